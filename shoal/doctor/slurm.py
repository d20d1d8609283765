"""Slurm, where it is installed: its programs answer, and would take a job."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from shoal.core.errors import ConfigError, SlurmError
from shoal.doctor.finding import Finding, ok, problem, warning
from shoal.launch.slurm import commands

_SUBJECT = "Slurm"
_ANSWER_S = 5.0


def check_slurm(runs: Path, env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Ask the controller for its partitions, and whether it would take a job; submit none."""
    if not commands.is_there():
        return [ok(_SUBJECT, "there is no sbatch here: runs are on this machine, or under torchrun")]
    try:
        version = commands.call(["sinfo", "--version"], timeout_s=_ANSWER_S).strip()
        partitions = commands.call(["sinfo", "--noheader", "--format=%R %a %D"], timeout_s=_ANSWER_S)
    except SlurmError as error:
        remedy = "see: scontrol ping; is this a login node, and is munge running? Without Slurm, leave --slurm out"
        return [warning(_SUBJECT, f"it is installed, but {_line(error)}", remedy)]
    up = [line.split() for line in partitions.splitlines() if len(line.split()) == 3]
    rows = ", ".join(f"{name} ({nodes} nodes{'' if state == 'up' else ', ' + state})" for name, state, nodes in up)
    found = [ok(_SUBJECT, f"{version}; partitions: {rows or 'none'}")]
    return found + _would_take() + _seen_elsewhere(runs, sum(int(row[2]) for row in up)) + _allocation(env)


def _would_take() -> list[Finding]:
    """Ask whether a job of this user would be taken."""
    from shoal.launch.slurm.site import read_site

    try:
        site = read_site()
    except ConfigError as error:
        return [
            problem(_SUBJECT, f"the site file cannot be used: {error}", "mend it; docs/cluster.md says what is in it")
        ]
    chosen = [f"--{name}={value}" for name in ("partition", "account") if (value := getattr(site, name))]
    try:
        commands.call(["sbatch", "--test-only", *chosen, *site.options, "--wrap=true"], timeout_s=_ANSWER_S)
    except SlurmError as error:
        remedy = "give what it asks for: shoal train --slurm --partition P --account A, or once for all in site.toml"
        return [warning(_SUBJECT, f"it would not take a job: {_line(error)}", f"{remedy} (docs/cluster.md)")]
    return [ok(_SUBJECT, f"it would take a job{' with ' + ' '.join(chosen) if chosen else ''}")]


def _seen_elsewhere(runs: Path, nodes: int) -> list[Finding]:
    from shoal.data.stage.tiers import file_system, is_shared

    if nodes < 2 or is_shared(runs):
        return []
    kind = file_system(runs) or "an unknown file system"
    fact = f"{runs} is on {kind}, which other nodes may not see: a run of several nodes needs its folder on each"
    return [warning(_SUBJECT, fact, "work in a folder that all nodes share, or give one: shoal train --runs DIR")]


def _allocation(env: Mapping[str, str]) -> list[Finding]:
    """Look at the job that this shell is in, if it is in one: it may have ended."""
    job = env.get("SLURM_JOB_ID", "")
    if not job:
        return []
    try:
        state = commands.states([job])[job].state
        if state not in commands.GOING:
            fact = f"SLURM_JOB_ID={job} is set, and that job is {state}: srun will be refused"
            return [warning(_SUBJECT, fact, "open a new shell, or unset SLURM_JOB_ID")]
        if shutil.which("srun"):
            commands.call(["srun", "--overlap", "--nodes=1", "--ntasks=1", "true"], timeout_s=_ANSWER_S)
    except SlurmError as error:
        return [warning(_SUBJECT, f"in job {job}: {_line(error)}", f"see: scontrol show job {job}")]
    return [ok(_SUBJECT, f"job {job} is {state}, and srun starts processes in it")]


def _line(error: SlurmError) -> str:
    return " ".join(str(error).split())

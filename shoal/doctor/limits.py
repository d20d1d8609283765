"""What the system lets one process have (ulimit)."""

import resource
from pathlib import Path

from shoal.core.units import format_bytes
from shoal.doctor.finding import Finding, ok, problem, warning

_UNLIMITED = resource.RLIM_INFINITY
_FEW_FILES, _TOO_FEW_FILES = 1024, 128
"""A worker has some 50 open, and two more for each other worker of the run; a loader one for each part of a pack."""
_FEW_PROCESSES = 512
"""Threads count, too: a worker has about 20."""
_SUBJECT = "limits"
_INFINIBAND = Path("/sys/class/infiniband")


def soft_limits() -> dict[str, int]:
    """Return what this process may have, by ulimit's letters."""
    letters = {
        "n": resource.RLIMIT_NOFILE,
        "u": resource.RLIMIT_NPROC,
        "l": resource.RLIMIT_MEMLOCK,
        "v": resource.RLIMIT_AS,
        "f": resource.RLIMIT_FSIZE,
    }
    return {letter: resource.getrlimit(number)[0] for letter, number in letters.items()}


def check_limits(limits: dict[str, int] | None = None, has_infiniband: bool | None = None) -> list[Finding]:
    """Look at the limits that trainings meet."""
    has_infiniband = _INFINIBAND.is_dir() if has_infiniband is None else has_infiniband
    found = soft_limits() if limits is None else limits
    files, processes = found["n"], found["u"]
    findings = []
    if _is_below(files, _FEW_FILES):
        says = problem if files < _TOO_FEW_FILES else warning
        findings.append(says(_SUBJECT, f"a process may have {files} files open", "ulimit -n 65536"))
    if _is_below(processes, _FEW_PROCESSES):
        findings.append(warning(_SUBJECT, f"you may have {processes} processes and threads", "ulimit -u 4096"))
    if found["v"] != _UNLIMITED:
        fact = f"addresses are limited to {format_bytes(found['v'])}, of which CUDA and mapped packs take many"
        findings.append(warning(_SUBJECT, fact, "ulimit -v unlimited"))
    if found["f"] != _UNLIMITED:
        fact = f"a file may have {format_bytes(found['f'])}: a checkpoint that is larger cannot be written"
        findings.append(warning(_SUBJECT, fact, "ulimit -f unlimited"))
    if has_infiniband and found["l"] != _UNLIMITED:
        fact = f"only {format_bytes(found['l'])} of memory may be locked, and InfiniBand locks what it sends"
        remedy = "ulimit -l unlimited; in Slurm's jobs: LimitMEMLOCK=infinity for slurmd"
        findings.append(warning(_SUBJECT, fact, remedy))
    return findings or [ok(_SUBJECT, f"{_said(files)} open files, {_said(processes)} processes and threads")]


def _is_below(limit: int, least: int) -> bool:
    return limit != _UNLIMITED and limit < least


def _said(limit: int) -> str:
    return "any number of" if limit == _UNLIMITED else f"{limit:,}"

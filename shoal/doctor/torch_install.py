"""torch: its version, its GPUs, and two processes that sum. It is asked in processes of their own (pair.py)."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.units import format_bytes, format_seconds
from shoal.doctor.finding import Finding, ok, problem, warning
from shoal.doctor.requirements import numbers

LIMIT_S = 90.0
"""Importing torch from a slow file system takes up to a minute."""
_OLDEST, _NEWEST = (2, 11), (2, 13)
"""The first with what shoal stands on, and the last that its tests have run with."""
_SLOW_IMPORT_S = 20.0
_DRIVER = Path("/proc/driver/nvidia/version")

Facts = Mapping[str, Mapping[str, Any]]
"""What the pair printed, by its stage; "ended" says how it ended, if not well."""


def check_torch(env: Mapping[str, str] = os.environ, *, limit_s: float = LIMIT_S) -> list[Finding]:
    """Ask torch, and say what its answers mean."""
    facts = ask(env, limit_s=limit_s)
    return [*judge_torch(facts), *judge_gpus(facts, driver_version()), *judge_sum(facts)]


def ask(env: Mapping[str, str], *, limit_s: float) -> dict[str, dict[str, Any]]:
    """Return what the pair finds within `limit_s`."""
    # By -m, as workers are started: a torch.py in this folder is then found here, as it would be in a run.
    command = [sys.executable, "-W", "ignore", "-m", "shoal.doctor.pair"]
    process = subprocess.Popen(
        command,
        env=dict(env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    ended = ""
    try:
        said, complaint = process.communicate(timeout=limit_s)
        if process.returncode != 0:
            last = [line for line in complaint.strip().splitlines() if line.strip()][-1:]
            how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
            ended = f"{last[0].strip() if last else 'no word'} ({how})"
    except subprocess.TimeoutExpired:
        ended = f"no answer within {limit_s:g} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
    finally:
        with contextlib.suppress(ProcessLookupError):  # the second process, if the first was killed
            os.killpg(process.pid, signal.SIGKILL)
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return {line["stage"]: line for line in lines} | ({"ended": {"how": ended}} if ended else {})


def judge_torch(facts: Facts) -> list[Finding]:
    """Say whether this torch can be used."""
    if "torch" not in facts:
        how = facts.get("ended", {}).get("how", "no word")
        remedy = f"install it anew: pip install --force-reinstall 'torch>={_dotted(_OLDEST)}'"
        return [problem("torch", f"it cannot be imported: {how}", remedy)]
    found = facts["torch"]
    version, took = str(found["version"]), format_seconds(float(found["import_s"]))
    if numbers(version)[:2] < _OLDEST:
        fact = f"{version} is older than {_dotted(_OLDEST)}"
        return [problem("torch", fact, f"pip install 'torch>={_dotted(_OLDEST)}'")]
    said = f"{version}, {_built(found)}, imported in {took}"
    if numbers(version)[:2] > _NEWEST:
        fact = f"{said}; it is newer than {_dotted(_NEWEST)}, the last that shoal was tested with"
        return [
            warning("torch", fact, f"if something fails that should not: pip install 'torch=={_dotted(_NEWEST)}.*'")
        ]
    if float(found["import_s"]) > _SLOW_IMPORT_S:
        remedy = "put the environment on a disk of this node; every worker's start waits for it"
        return [warning("torch", said, remedy)]
    return [ok("torch", said)]


def judge_gpus(facts: Facts, driver: str) -> list[Finding]:
    """Say what GPUs there are, and why those are not used that are not; `driver` is the kernel's, or ""."""
    found, versions = facts.get("gpus"), facts.get("torch")
    if versions is None or found is None:
        return []
    if "error" in found:
        remedy = f"see whether nvidia-smi works, and whether torch's CUDA {versions['cuda']} goes with driver {driver}"
        return [problem("GPUs", f"a product fails: {found['error']}", remedy)]
    if found["count"]:
        names = [f"{name} ({format_bytes(size)})" for name, size in found["names"]]
        counted = [f"{names.count(name)} x {name}" for name in dict.fromkeys(names)]
        return [ok("GPUs", f"{', '.join(counted)}{', driver ' + driver if driver else ''}; each multiplies")]
    if driver and not versions["cuda"]:
        fact = f"NVIDIA's driver {driver} is here, but torch {versions['version']} is built without CUDA"
        return [warning("GPUs", fact, "install a CUDA build of torch, if runs are to use the GPUs")]
    if driver:
        fact = f"NVIDIA's driver {driver} is here, but torch (CUDA {versions['cuda']}) finds no GPU"
        remedy = f"see whether nvidia-smi lists one; a driver older than CUDA {versions['cuda']} needs an older torch"
        return [problem("GPUs", f"{fact}", remedy)]
    return [ok("GPUs", "none: workers compute on the processor")]


def judge_sum(facts: Facts) -> list[Finding]:
    """Say whether two processes formed a group and summed."""
    if "torch" not in facts:
        return []
    subject = "process group"
    if not facts["torch"]["has_gloo"]:
        return [problem(subject, "this torch is built without Gloo", "install torch from its makers' wheels")]
    remedy = "see the lines about ports, interfaces and variables, and the firewall's rules for loopback"
    for stage, name in (("sum", "Gloo over loopback"), ("nccl", "NCCL")):
        found = facts.get(stage)
        if found is None and stage == "nccl":
            continue
        said = found or {"error": facts.get("ended", {}).get("how", "no word")}
        if said.get("sum") != 3.0:
            why = said.get("error", f"1 and 2 are {said.get('sum')}")
            how = remedy if stage == "sum" else "run with NCCL_DEBUG=INFO to see what NCCL lacks"
            return [problem(subject, f"two processes do not sum by {name}: {why}", how)]
    took = format_seconds(float(facts["sum"]["seconds"]))
    by_nccl = f", and by NCCL {facts['torch']['nccl']}" if "nccl" in facts else ""
    return [ok(subject, f"two processes summed by Gloo over loopback in {took}{by_nccl}")]


def driver_version(file: Path = _DRIVER) -> str:
    """Return the version of NVIDIA's kernel driver, or "" where it is not loaded."""
    try:
        match = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", file.read_text())
    except OSError:
        return ""
    return match[1] if match else "of unknown version"


def _built(found: Mapping[str, Any]) -> str:
    if found["cuda"]:
        return f"for CUDA {found['cuda']}" + (f" with NCCL {found['nccl']}" if found["nccl"] else "")
    return f"for ROCm {found['hip']}" if found["hip"] else "for the processor"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))

"""Cores and memory: what the machine has, and what of it this process may use."""

import os
from collections.abc import Mapping
from pathlib import Path

from shoal.core.control_groups import core_quota, memory_limit
from shoal.core.host import available_memory, memory_bytes, usable_cores
from shoal.core.units import format_bytes
from shoal.doctor.finding import Finding, ok, warning

_LITTLE_BYTES = 1 << 30
"""A worker takes 0.3 GB before its model is there."""
_THREADS = "OMP_NUM_THREADS"


def check_cores(
    env: Mapping[str, str] = os.environ, *, usable: int | None = None, quota: float | None = None
) -> list[Finding]:
    """Compare the cores that workers compute on with what this process may use of them."""
    usable = usable_cores() if usable is None else usable
    quota = core_quota() if quota is None else quota
    if quota is not None and quota < usable:
        fact = (
            f"{usable} cores are seen, but the control group allows the time of {quota:g}: threads wait for each other"
        )
        return [warning("cores", fact, f"export {_THREADS}={max(1, int(quota))}, or ask for more cores")]
    threads = env.get(_THREADS, "")
    if threads and (not threads.split(",")[0].isdigit() or int(threads.split(",")[0]) > usable):
        fact = f"{_THREADS}={threads}, and {_cores(usable)} may be used: each worker starts so many threads"
        return [warning("cores", fact, f"unset {_THREADS}: shoal gives each worker its part of the cores")]
    if threads == "1" and usable > 1:
        fact = f"{_THREADS}=1, and {_cores(usable)} may be used: each worker computes on one"
        return [warning("cores", fact, f"unset {_THREADS}, unless there is a worker for each core")]
    seen = os.cpu_count() or usable
    return [ok("cores", f"{usable} of {seen} may be used" if usable < seen else f"{usable}")]


def check_memory(
    *, total_bytes: int | None = None, available_bytes: int | None = None, limit_bytes: int | None = None
) -> list[Finding]:
    """Compare the memory that the machine has with what this process may take."""
    total = memory_bytes() if total_bytes is None else total_bytes
    available = available_memory() if available_bytes is None else available_bytes
    limit = memory_limit() if limit_bytes is None else limit_bytes
    fact = f"{format_bytes(available)} available of {format_bytes(total)}"
    if limit is not None and limit < total:
        fact += f", and the control group allows {format_bytes(limit)}"
        available = min(available, limit)
    if available < _LITTLE_BYTES:
        return [warning("memory", f"{fact}: a worker takes 0.3 GB before its model is there", "end what takes it: top")]
    if _is_never_overcommitted():
        said = f"{fact}; vm.overcommit_memory=2: forked workers may be refused memory that they only share"
        return [warning("memory", said, "as root: sysctl vm.overcommit_memory=0")]
    return [ok("memory", fact)]


def _is_never_overcommitted(file: Path = Path("/proc/sys/vm/overcommit_memory")) -> bool:
    try:
        return file.read_text().strip() == "2"
    except OSError:
        return False


def _cores(count: int) -> str:
    return "1 core" if count == 1 else f"{count} cores"

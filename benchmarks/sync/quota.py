"""Cores for workers, and parts of cores by Linux's control groups: a machine with few has several equal, slower ones.

    with quotas(4, cores=0.45) as groups:       # root only
        groups.join(0, process.pid)

Whoever is in a group shares its part: beside three busy loops, a worker gets a quarter of it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_PERIOD_US = 10_000
"""How finely time is dealt out."""


def available() -> bool:
    """Return whether this process may deal out cores."""
    return os.geteuid() == 0 and _parent() is not None


def own_cores(count: int) -> tuple[int, ...]:
    """Return so many cores, each another one of the chip; nothing where there is not one more of them."""
    found: dict[str, int] = {}
    for core in sorted(os.sched_getaffinity(0)):
        siblings = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        found.setdefault(siblings.read_text().strip() if siblings.exists() else str(core), core)
    return tuple(found.values())[1 : count + 1] if len(found) > count else ()


@contextmanager
def quotas(count: int, *, cores: float) -> Iterator[tuple[str, ...]]:
    """Yield the files of `count` groups, each with so much of a core, for the length of a `with` block.

    A process joins one by writing its number into the file; it must have ended when the block does.
    """
    parent = _parent()
    assert parent is not None, "no control groups here"
    made = [parent / f"shoal-{os.getpid()}-{index}" for index in range(count)]
    try:
        for group in made:
            group.mkdir()
            _limit(group, int(cores * _PERIOD_US))
        yield tuple(str(group / "cgroup.procs") for group in made)
    finally:
        for group in made:
            if group.exists():
                group.rmdir()


def _parent() -> Path | None:
    """Return the folder to make groups in: of control groups' first version, or of the second."""
    if (_ROOT / "cpu/cpu.cfs_quota_us").exists() or (_ROOT / "cpu/cgroup.procs").exists():
        return _ROOT / "cpu"
    control = _ROOT / "cgroup.subtree_control"
    return _ROOT if control.exists() and "cpu" in control.read_text().split() else None


def _limit(group: Path, quota_us: int) -> None:
    if (group / "cpu.max").exists():
        (group / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
        return
    (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(quota_us))

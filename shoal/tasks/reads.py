"""How many tasks of a map read shared storage at once: `with shoal.tasks.reads.reading(): ...` around what reads.

A number N (`reads_at_once=N`) gives N leases, each a locked file in the folder of the map; a task that dies lets go of
its own. "auto" begins with one, and measures: as long as another reader adds at least half of what each of the others
gets, there is one more (shoal/data/stage/turns.py). What a process has read is what it asked the system for, or what
the system has fetched for it, if that is more: of a file that is mapped into memory nothing is asked for. Outside a map
with a limit, `reading` does nothing.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ConfigError
from shoal.core.looks import Looks

if TYPE_CHECKING:
    from shoal.data.stage.locks import FileLock

VARIABLE = "SHOAL_READS"
TIMEOUT_S = 600.0
"""A task that has waited so long reads all the same: slow, but not stuck."""
_LOOK_S, _LATEST_LOOK_S = 0.02, 1.0


def check(reads_at_once: int | str | None) -> None:
    """Raise ConfigError unless this is a number of reads, "auto" or None."""
    if reads_at_once not in (None, "auto") and (not isinstance(reads_at_once, int) or reads_at_once < 1):
        raise ConfigError(f'reads_at_once={reads_at_once!r}: give a number from 1 on, or "auto" to measure it.')


def announce(folder: Path, reads_at_once: int | str | None) -> None:
    """Tell the tasks of this process how many may read at once, and where they agree on it."""
    if reads_at_once is None:
        os.environ.pop(VARIABLE, None)
    else:
        (folder / "reads").mkdir(mode=0o700, exist_ok=True)
        os.environ[VARIABLE] = f"{reads_at_once}:{folder / 'reads'}"


@contextmanager
def reading(*, timeout_s: float = TIMEOUT_S) -> Iterator[None]:
    """Have one of the leases to read shared storage for the length of a `with` block."""
    most, _, folder = os.environ.get(VARIABLE, "").partition(":")
    if not most:
        yield
    elif most == "auto":
        with _measured(Path(folder), timeout_s):
            yield
    else:
        with _leased(Path(folder), int(most), timeout_s):
            yield


@contextmanager
def _leased(folder: Path, most: int, timeout_s: float) -> Iterator[None]:
    from shoal.data.stage.locks import FileLock

    folder.mkdir(exist_ok=True)
    locks = [FileLock(folder / f"{number}.lock") for number in range(most)]
    end_s = time.monotonic() + timeout_s
    looks = Looks(_LOOK_S, _LATEST_LOOK_S)
    held = _try(locks)
    while held is None and looks.is_due() and time.monotonic() < end_s:
        time.sleep(looks.left_s())
        held = _try(locks)
    try:
        yield
    finally:
        if held is not None:
            held.release()


def _try(locks: Sequence["FileLock"]) -> "FileLock | None":
    return next((lock for lock in locks if lock.take()), None)


@contextmanager
def _measured(folder: Path, timeout_s: float) -> Iterator[None]:
    from shoal.data.stage.turns import FolderTurns

    with FolderTurns(folder).take(timeout_s=timeout_s) as turn:
        begun_s, before = time.monotonic(), _bytes_read()
        yield
        read = max(now - then for now, then in zip(_bytes_read(), before, strict=True))
        turn.bytes_per_s = read / max(time.monotonic() - begun_s, 1e-6)


def _bytes_read(counters: Path = Path("/proc/self/io")) -> tuple[int, int]:
    """Return what this process has asked for so far, and what was fetched for it; 0 where the kernel does not count."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        counts = dict(line.split(": ") for line in counters.read_text().splitlines())
        return int(counts["rchar"]), int(counts["read_bytes"])
    return 0, 0

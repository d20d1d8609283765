"""How many tasks of a map read shared storage at once: `with shoal.tasks.reads.reading(): ...` around what reads.

A number N (`reads_at_once=N`) gives N leases, each a locked file in the folder of the map; a task that dies lets go of
its own. "auto" begins with one, and measures: as long as another reader adds at least half of what each of the others
gets, there is one more (shoal/data/stage/turns.py). Outside a map with a limit, `reading` does nothing.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal.core.errors import ConfigError

VARIABLE = "SHOAL_READS"
TIMEOUT_S = 600.0
"""A task that has waited so long reads all the same: slow, but not stuck."""
_POLL_S = 0.02


def check(reads_at_once: int | str | None) -> None:
    """Raise ConfigError unless this is a number of reads, "auto" or None."""
    if reads_at_once not in (None, "auto") and (not isinstance(reads_at_once, int) or reads_at_once < 1):
        raise ConfigError(f'reads_at_once={reads_at_once!r}: give a number from 1 on, or "auto" to measure it.')


def announce(folder: Path, reads_at_once: int | str | None) -> None:
    """Tell the tasks of this process how many may read at once, and where they agree on it."""
    if reads_at_once is None:
        os.environ.pop(VARIABLE, None)
    else:
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
    held = next((lock for lock in locks if lock.take()), None)
    while held is None and time.monotonic() < end_s:
        time.sleep(_POLL_S)
        held = next((lock for lock in locks if lock.take()), None)
    try:
        yield
    finally:
        if held is not None:
            held.release()


@contextmanager
def _measured(folder: Path, timeout_s: float) -> Iterator[None]:
    from shoal.data.stage.turns import FolderTurns

    with FolderTurns(folder).take(timeout_s=timeout_s) as turn:
        begun_s, before = time.monotonic(), _bytes_read()
        yield
        turn.bytes_per_s = (_bytes_read() - before) / max(time.monotonic() - begun_s, 1e-6)


def _bytes_read() -> int:
    """Return what this process has read so far, from anywhere; 0 where the kernel does not count."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])
    return 0

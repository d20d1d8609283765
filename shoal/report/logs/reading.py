"""A run's event logs, read with distrust: whatever cannot be used is left out, and said.

Logs of a few megabytes are read line by line. Those of more (64 workers and 100,000 steps write 2 GB) go through
Arrow's JSON reader into columns: importing it takes longer than reading a small run, and saves minutes of a large one.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.lines import LineReader
from shoal.report.logs.log import WorkerLog, clean, note_time, step_of
from shoal.report.logs.takers import TAKERS

if TYPE_CHECKING:
    from shoal.report.logs.columns import Columns, ColumnsReader

LARGE_BYTES = 16_000_000
"""Of all logs together: half a second's work line by line."""
_STEP_LINE = b'{"kind": "step", '
_BLOCK_BYTES = 32_000_000


def is_large(paths: Sequence[Path]) -> bool:
    """Return whether the logs are to be read by `read_large`."""
    return sum(_size_of(path) for path in paths) > LARGE_BYTES


def _size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def read_small(path: Path, rank: int) -> WorkerLog:
    """Return what `path` says of worker `rank`; no state of the file makes this fail."""
    log = WorkerLog(rank)
    try:
        log.present = path.exists()
        lines = LineReader(path).poll()
        log.half_written = log.present and _ends_inside_a_line(path)
    except OSError as error:
        log.unreadable = clean(error.strerror or str(error))
        return log
    _take_lines(log, lines)
    log.num_steps = len(log.steps)
    log.first_step, log.last_step = min(log.steps, default=None), max(log.steps, default=None)
    return log


def read_large(path: Path, rank: int) -> "tuple[WorkerLog, Columns]":
    """Return the same with the steps in columns; the memory needed does not grow with the file but for them."""
    from shoal.report.logs.columns import ColumnsReader

    log, columns = WorkerLog(rank), ColumnsReader()
    try:
        log.present = path.exists()
        if log.present:
            with path.open("rb") as file:
                rest = b""
                while block := file.read(_BLOCK_BYTES):
                    whole, newline, rest = (rest + block).rpartition(b"\n")
                    if newline:
                        _take_block(log, columns, whole.split(b"\n"))
                log.half_written = bool(rest)
    except OSError as error:
        log.unreadable = clean(error.strerror or str(error))
    found = columns.finish()
    log.num_steps, log.first_step, log.last_step = len(found), found.first_step, found.last_step
    return log, found


def _take_block(log: WorkerLog, columns: "ColumnsReader", lines: list[bytes]) -> None:
    steps = [line for line in lines if line.startswith(_STEP_LINE)]
    others = [line for line in lines if not line.startswith(_STEP_LINE)] if len(steps) < len(lines) else []
    times = columns.take(steps) if steps else ()
    if times is None:  # something in it is not as it should be: line by line, to leave out no more than that
        _take_lines(log, lines)
        columns.take_steps(log.steps)
        log.steps = {}
        return
    before = (log.first_time_s, log.last_time_s)
    _take_lines(log, others)
    known = [time for time in (*before, *times, log.first_time_s, log.last_time_s) if time is not None]
    if known:
        log.first_time_s, log.last_time_s = before[0] if before[0] is not None else min(known), max(known)


def _take_lines(log: WorkerLog, lines: Iterable[bytes]) -> None:
    for line in lines:
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            log.damaged_lines += 1
            continue
        if isinstance(event, dict) and "kind" in event:
            _take(log, event)
        else:
            log.damaged_lines += 1


def _take(log: WorkerLog, event: dict[str, Any]) -> None:
    """Add one event to `log`; one that makes no sense counts as damage. Kinds of a later version are passed over."""
    note_time(log, event.get("time"))
    kind = event["kind"]
    if kind == "step":
        found = step_of(event)
        if found is not None:
            log.steps[found[0]] = found[1]
            return
    elif isinstance(kind, str) and (kind not in TAKERS or TAKERS[kind](log, event)):
        return
    log.damaged_lines += 1


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"

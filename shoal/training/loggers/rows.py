"""The numbers of a run by step, read off its events while workers write them.

1. Worker 0's log tells of the steps, and of what worker 0 does alone. The others' tell of both where it has a gap, for
   another may have become worker 0 until it was replaced, and where it stands still (the loss is the same on every
   worker). Example: 1 to 10 and 21 to 30 from worker 0, 11 to 20 from worker 1, with its evaluation after step 15.
2. Of steps that are less than 0.1 s apart only the first counts: more points nobody can see. The last always counts.
3. Steps that are done again, after a checkpoint or a lost worker, are passed over: they have been told of.
4. A log that was put aside for a new one, as when a run is gone on with, is read anew.
"""

import json
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.events import STEP_PARTS
from shoal.core.lines import LineReader
from shoal.core.run_folder import RunFolder

APART_S = 0.1
_STEP_LINE = b'{"kind": "step"'
_ALONE_LINES = (b'{"kind": "eval"', b'{"kind": "log"')
"""What worker 0 alone writes."""
_STILL_POLLS = 3
"""After so many looks without news, worker 0 is taken for lost."""


@dataclass
class Row:
    """Numbers that were true after a step."""

    step: int
    time_s: float
    values: dict[str, float]


def step_values(
    loss: float | None, batch_weight: float, seconds: Mapping[str, float], *, step_s: float, unit: str
) -> dict[str, float]:
    """Return what is logged of a step: its loss, the throughput, and where its time went."""
    values = {"loss": math.nan if loss is None else loss}
    if step_s > 0:
        values[f"{unit}_per_s"] = batch_weight / step_s
    return values | {f"seconds/{name.removesuffix('_s')}": seconds.get(name, 0.0) for name in STEP_PARTS}


def eval_values(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Return what is logged of an evaluation."""
    return {f"eval/{name}": math.nan if value is None else value for name, value in metrics.items()}


class Rows:
    """The rows of a run after the step `after`, as they come; `is_whole`: nothing that was logged of it either."""

    def __init__(self, folder: RunFolder, *, unit: str, after: int = 0, is_whole: bool = False) -> None:
        self._folder, self._unit, self._last = folder, unit, after
        self._first_logged = after + 1 if is_whole and after else after
        self._readers: dict[Path, tuple[int, LineReader]] = {}
        self._still = 0
        self._held: dict[int, list[bytes]] = {}
        """What others have told of steps that worker 0 has not told of, at least not yet."""
        self._told_s = -math.inf
        self._passed_over: Row | None = None

    def poll(self, *, is_over: bool = False) -> list[Row]:
        """Return what is new, in the order of steps; with `is_over`, also the last step."""
        lines = self._new_lines(self._folder.events_of(0))
        self._still = 0 if lines else self._still + 1
        told = {_step_of(line) for line in lines if line.startswith(_STEP_LINE)}
        for path in self._others():
            self._hold(self._new_lines(path), told)
        found = self._rows(self._with_gaps(lines))
        if is_over or self._still >= _STILL_POLLS:
            found += self._rows(line for step in sorted(self._held) for line in self._held[step])
            self._held.clear()
        self._held = {step: held for step, held in self._held.items() if step >= self._last}
        if is_over and self._passed_over is not None:
            found.append(self._passed_over)
            self._passed_over = None
        return _merged(found)

    def _hold(self, lines: Iterable[bytes], told: Set[int]) -> None:
        """Keep what another worker tells of a step, unless worker 0 has `told` of it: of a step itself one line."""
        for line in lines:
            is_step = line.startswith(_STEP_LINE)
            step = _step_of(line) if is_step or line.startswith(_ALONE_LINES) else -1
            if step < self._last or (is_step and step in told):
                continue
            held = self._held.setdefault(step, [])
            if not is_step:
                held.append(line)
            elif not (held and held[0].startswith(_STEP_LINE)):
                held.insert(0, line)

    def _with_gaps(self, lines: Iterable[bytes]) -> Iterator[bytes]:
        """Yield worker 0's lines, and before each step what is held of those before it."""
        held = deque(sorted(self._held))
        for line in lines:
            number = _step_of(line) if line.startswith(_STEP_LINE) else -1
            while held and held[0] < number:
                yield from self._held.pop(held.popleft())
            yield line

    def _others(self) -> list[Path]:
        lead = self._folder.events_of(0)
        return sorted(path for path in self._folder.events.glob("rank-*.jsonl") if path != lead)

    def _new_lines(self, path: Path) -> list[bytes]:
        try:
            inode = path.stat().st_ino
            if self._readers.get(path, (None,))[0] != inode:
                self._readers[path] = (inode, LineReader(path))
            return self._readers[path][1].poll()
        except OSError:  # not there yet, or on a disk that does not answer: the next look may see it
            return []

    def _rows(self, lines: Iterable[bytes]) -> list[Row]:
        found = []
        for line in lines:
            try:
                row = self._row(json.loads(line))
            except (ValueError, KeyError, TypeError, AttributeError):  # a line that was cut off
                continue
            if row is not None:
                found.append(row)
        return found

    def _row(self, event: dict[str, Any]) -> Row | None:
        kind = event["kind"]
        if kind == "step":
            return self._step(event)
        if kind not in ("eval", "log") or event["step"] < max(self._last, self._first_logged):
            return None
        values = eval_values(event["metrics"]) if kind == "eval" else event["values"]
        numbers = {name: math.nan if value is None else float(value) for name, value in values.items()}
        return Row(event["step"], event["time"], numbers)

    def _step(self, event: dict[str, Any]) -> Row | None:
        if event["step"] <= self._last:
            return None
        self._last = event["step"]
        values = step_values(
            event["loss"], event.get("batch_weight") or 0.0, event, step_s=event["step_s"], unit=self._unit
        )
        row = Row(event["step"], event["time"], values)
        if row.time_s - self._told_s < APART_S:
            self._passed_over = row
            return None
        self._told_s, self._passed_over = row.time_s, None
        return row


def _step_of(line: bytes) -> int:
    """Return which step a line is about, without parsing it: others' lines are many, and most are passed over."""
    number = line.partition(b'"step": ')[2].partition(b",")[0]
    return int(number) if number.isdigit() else -1


def _merged(rows: list[Row]) -> list[Row]:
    """Return one row for each step, in their order."""
    merged: dict[int, Row] = {}
    for row in rows:
        if row.step in merged:
            merged[row.step].values |= row.values
        else:
            merged[row.step] = row
    return [merged[step] for step in sorted(merged)]

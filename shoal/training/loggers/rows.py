"""The numbers of a run by step, read off its events while workers write them.

1. Worker 0's log tells of the steps; of the others' only what worker 0 does alone: another may have become worker 0.
   If worker 0's log stands still, whoever goes on tells of the steps (the loss is the same on every worker).
2. Of steps that are less than 0.1 s apart only the first counts: more points nobody can see. The last always counts.
3. Steps that are done again, after a checkpoint or a lost worker, are passed over: they have been told of.
4. A log that was put aside for a new one, as when a run is gone on with, is read anew.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.events import STEP_PARTS
from shoal.core.lines import LineReader
from shoal.core.run_folder import RunFolder

APART_S = 0.1
_STEP_LINE = b'{"kind": "step"'
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
        self._held: list[bytes] = []
        """What others have told of steps since worker 0's log stands still."""
        self._told_s = -math.inf
        self._passed_over: Row | None = None

    def poll(self, *, is_over: bool = False) -> list[Row]:
        """Return what is new, in the order of steps; with `is_over`, also the last step."""
        first, *others = [self._folder.events_of(0), *self._others()]
        lines = self._new_lines(first)
        self._still = 0 if lines else self._still + 1
        found = self._rows(lines)
        if not self._still:
            self._held.clear()  # worker 0 tells of them itself
        for path in others:
            lines = self._new_lines(path)
            found += self._rows(line for line in lines if not line.startswith(_STEP_LINE))
            self._held += [line for line in lines if line.startswith(_STEP_LINE) and _step_of(line) > self._last]
        if is_over or self._still >= _STILL_POLLS:
            found += self._rows(self._held)
            self._held.clear()
        if is_over and self._passed_over is not None:
            found.append(self._passed_over)
            self._passed_over = None
        return _merged(found)

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

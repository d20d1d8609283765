"""One worker's event log, read as it grows, from its end: what a live view needs, at a cost that the run cannot feel.

1. Of what is new, at most `_MOST_BYTES` are read: what lies before, as when a long run is opened, is passed over.
2. Of the lines about steps only the last `_MOST_STEPS` are parsed: more nobody can see between two looks.
3. All other lines are parsed: they are few.
4. A log that was put aside for a new one, as when a run is gone on with, is read anew.
"""

import os
from collections import deque
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.events import STEP_PARTS
from shoal.report.logs.log import Step, amount, clean, number, parsed

_MOST_BYTES = 512 * 1024
_MOST_STEPS = 20
_HEAD_BYTES = 4096
"""The first lines, where the worker says on which host it is."""
_STEP_LINE = b'{"kind": "step"'
"""How `EventLog` begins the line of a step; such a line written otherwise is parsed like any other."""


class LiveStep(NamedTuple):
    """One step of one worker, and when it was done."""

    number: int
    time_s: float
    step: Step


class LiveLog:
    """What one worker has said last."""

    def __init__(self, path: Path, rank: int) -> None:
        self.rank = rank
        self._path = path
        self._begin()
        self._offset, self._file_id = 0, -1
        self._told_s = 0.0
        """Up to when all is known of the log that was put aside: the new one begins with some of its events."""

    def _begin(self) -> None:
        self.steps: deque[LiveStep] = deque(maxlen=2 * _MOST_STEPS)
        self.host = ""
        self.is_started = False
        """Whether it has said that it is up."""
        self.is_ended = False
        self.error = ""
        """The kind and the text of its last words."""
        self.peak_bytes: int | None = None
        self.last_time_s: float | None = None

    @property
    def last(self) -> LiveStep | None:
        """Its last step since it was started."""
        return self.steps[-1] if self.steps else None

    def poll(self) -> list[dict[str, Any]]:
        """Take in what is new, and return the events of it that are about no step; none where it cannot be read."""
        try:
            lines = self._new_lines()
        except OSError:  # not there yet, or on a disk that does not answer: the next look may see it
            return []
        of_steps = [i for i, line in enumerate(lines) if line.startswith(_STEP_LINE)]
        passed_over = set(of_steps[:-_MOST_STEPS])
        events = [_parsed(line) for i, line in enumerate(lines) if i not in passed_over]
        for event in events:
            self._take(event)
        return [event for event in events if event.get("kind") not in (None, "step") and self._is_new(event)]

    def _is_new(self, event: dict[str, Any]) -> bool:
        time_s = amount(event.get("time"))
        return time_s is None or time_s > self._told_s

    def _new_lines(self) -> list[bytes]:
        with self._path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._file_id or status.st_size < self._offset:
                self._told_s = max(self._told_s, self.last_time_s or 0.0)
                self._begin()
                self._offset, self._file_id = 0, status.st_ino
            if status.st_size == self._offset:
                return []
            head: list[bytes] = []
            if status.st_size - self._offset > _MOST_BYTES:
                head = file.read(_HEAD_BYTES).splitlines()[:-1] if self._offset == 0 else []
                self._offset = status.st_size - _MOST_BYTES
                file.seek(self._offset)
                self._offset += len(file.readline())  # the rest of a line
            file.seek(self._offset)
            data = file.read(status.st_size - self._offset)
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return head + whole.splitlines()

    def _take(self, event: dict[str, Any]) -> None:
        time_s = amount(event.get("time"))
        self.last_time_s = self.last_time_s if time_s is None else time_s
        peak = amount(event.get("peak_bytes"))
        if peak:
            self.peak_bytes = max(self.peak_bytes or 0, int(peak))
        kind = event.get("kind")
        if kind == "step":
            self._take_step(event, time_s)
        elif kind == "start":
            self.steps.clear()  # those of an attempt before
            self.is_started, self.is_ended, self.error, self.peak_bytes = True, False, "", None
            self.host = clean(event.get("host", ""))
        elif kind == "end":
            self.is_ended = True
        elif kind == "error":
            self.error = clean(f"{event.get('type', 'error')}: {event.get('message', '')}")

    def _take_step(self, event: dict[str, Any], time_s: float | None) -> None:
        step = live_step(event, time_s)
        if step is None:
            return
        if self.steps and step.number <= self.steps[-1].number:  # gone back to a snapshot or a checkpoint
            self.steps.clear()
        self.steps.append(step)


def live_step(event: dict[str, Any], time_s: float | None) -> LiveStep | None:
    """Return the step that `event` tells of, or None where it makes no sense."""
    step, total_s = event.get("step"), amount(event.get("step_s"))
    if not isinstance(step, int) or isinstance(step, bool) or total_s is None or time_s is None:
        return None
    samples, weight, batch_weight, *parts_s = (
        amount(event.get(name)) or 0.0 for name in ("samples", "weight", "batch_weight", *STEP_PARTS)
    )
    loss = number(event.get("loss"))
    return LiveStep(step, time_s, Step(loss, samples, weight, batch_weight, total_s, tuple(parts_s)))


def sample_steps(path: Path, most: int) -> list[LiveStep]:
    """Return up to about `most` steps of a whole log, evenly over its length; a long log costs no more.

    Each is the first whole line after one of `most` places in the file; where that is about no step, the place is
    passed over.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            lines = (
                file.readlines() if size <= _MOST_BYTES else [_line_after(file, size * i // most) for i in range(most)]
            )
    except OSError:
        return []
    events = [_parsed(line) for line in lines if line.startswith(_STEP_LINE) and line.endswith(b"\n")]
    found = {step.number: step for event in events if (step := live_step(event, amount(event.get("time"))))}
    return [found[number] for number in sorted(found)]


def _line_after(file: Any, place: int) -> bytes:
    file.seek(place)
    if place:
        file.readline()
    line: bytes = file.readline()
    return line


def _parsed(line: bytes) -> dict[str, Any]:
    """Return the event of a line, or one without a kind where it is damaged."""
    event = parsed(line)
    return event if isinstance(event.get("kind"), str) else {}

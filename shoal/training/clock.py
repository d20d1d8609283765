"""Where the time of a step goes."""

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

Seconds: TypeAlias = Callable[[], dict[str, float]]
"""Tells the seconds of a step by name. On a GPU it waits until the step is done."""


class StepClock:
    """Adds up the seconds between marks, by name. On a GPU the marks are events in its stream, read after the step."""

    def __init__(self, device: torch.device) -> None:
        self._now = _gpu_event if device.type == "cuda" else time.perf_counter
        self._marks: list[tuple[str, Any]] = []
        self._moved: list[tuple[str, str, float]] = []
        self._waited_s = 0.0
        self._noted: Any = None

    def restart(self) -> None:
        """Forget all marks; the next one counts from here."""
        self._marks = [("", self._now())]
        self._moved = []
        self._waited_s = 0.0
        self._noted = None

    def mark(self, name: str) -> None:
        """Count the time since the last mark as `name`, but for what was waited of it, which is communication."""
        self._marks.append((name, self._now()))
        if self._waited_s:
            self.move(name, "comm_s", self._waited_s)
            self._waited_s = 0.0

    def waited(self, seconds: float) -> None:
        """Count `seconds` since the last mark as communication that the worker waited for."""
        self._waited_s += seconds

    def move(self, name: str, to: str, seconds: float) -> None:
        """Count `seconds` of `name` as `to`."""
        self._moved.append((name, to, seconds))

    def note(self) -> None:
        """Remember this moment for `mark_noted`; a later note takes its place."""
        self._noted = self._now()

    def mark_noted(self, before: str, after: str) -> None:
        """Count the time since the last mark as `before` up to the noted moment, and as `after` from there on."""
        if self._noted is not None:
            self._marks.append((before, self._noted))
            self._noted = None
        self.mark(after)

    def take(self) -> Seconds:
        """Return what tells the seconds of the step up to here, and begin the next."""
        marks, moved = self._marks, self._moved
        self.restart()
        return lambda: _added_up(marks, moved)


def _added_up(marks: list[tuple[str, Any]], moved: list[tuple[str, str, float]]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for (_, begin), (name, end) in itertools.pairwise(marks):
        seconds[name] = seconds.get(name, 0.0) + _seconds_between(begin, end)
    for name, to, part_s in moved:
        seconds[name] = seconds.get(name, 0.0) - part_s
        seconds[to] = seconds.get(to, 0.0) + part_s
    return seconds


def _gpu_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _seconds_between(begin: Any, end: Any) -> float:
    if isinstance(begin, torch.cuda.Event):
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    return float(end - begin)

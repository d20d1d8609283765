"""Where the time of a step goes.

1. Marks cut a step's time into parts, by name: each counts what has passed since the one before.
2. Spans are parts of their own inside of a mark's: what a pipeline stage computes between its waits.
3. Waits for communication lie inside of either, and count as `comm_s` instead.

On a GPU all moments are events in the stream that computes, read after the step: a wait is then how long that stream
stood still, not how long a transfer took beside it.

Example: mark at 0, spans of forward_s from 1 to 3 and of backward_s from 6 to 9, a wait from 2 to 2.5, mark("bubble_s")
at 10: forward_s is 1.5, backward_s 3, comm_s 0.5, bubble_s 5.
"""

import bisect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import torch

Seconds: TypeAlias = Callable[[], dict[str, float]]
"""Tells the seconds of a step by name. On a GPU it waits until the step is done."""
Moment: TypeAlias = Any
"""A reading of the clock: seconds, or an event in a GPU's stream."""


class Span(NamedTuple):
    """Some time, from one moment to another, and what it counts as."""

    name: str
    begin: Moment
    end: Moment


class StepClock:
    """Measures the steps of one worker, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._is_waiting = False
        self._noted: Moment = None
        self._marks: list[tuple[str, Moment]] = []
        self._spans: list[Span] = []

    def now(self) -> Moment:
        """Return this moment."""
        if self._stream is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def restart(self) -> None:
        """Forget all there is; the next mark counts from here."""
        self._marks, self._spans = [("", self.now())], []
        self._noted = None

    def mark(self, name: str) -> None:
        """Count the time since the last mark as `name`."""
        self._marks.append((name, self.now()))

    def note(self) -> None:
        """Remember this moment for `mark_noted`; a later note takes its place."""
        self._noted = self.now()

    def mark_noted(self, before: str, after: str) -> None:
        """Count the time since the last mark as `before` up to the noted moment, and as `after` from there on."""
        if self._noted is not None:
            self._marks.append((before, self._noted))
            self._noted = None
        self.mark(after)

    def span(self, name: str, begin: Moment, end: Moment) -> None:
        """Count the time from `begin` to `end` as `name`, whatever is marked around it."""
        self._spans.append(Span(name, begin, end))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what passes in a `with` block as communication that the worker waits for. May be nested."""
        if self._is_waiting:
            yield
            return
        self._is_waiting = True
        begin = self.now()
        try:
            yield
        finally:
            self._is_waiting = False
            self._spans.append(Span("comm_s", begin, self.now()))

    def take(self) -> Seconds:
        """Return what tells the seconds of the step up to here, and begin the next."""
        marks, spans = self._marks, self._spans
        self.restart()
        return lambda: _added_up(marks, spans)


def _added_up(marks: list[tuple[str, Moment]], spans: list[Span]) -> dict[str, float]:
    start = marks[0][1]
    ends = [_seconds_between(start, moment) for _, moment in marks[1:]]
    parts: dict[str, float] = {}
    for (name, _), begin_s, end_s in zip(marks[1:], [0.0, *ends], ends, strict=False):
        parts[name] = parts.get(name, 0.0) + end_s - begin_s
    # In the order in which they begin, the shorter of two that begin together last: it lies inside the other.
    timed = [(_seconds_between(start, span.begin), _seconds_between(start, span.end), span.name) for span in spans]
    outer: tuple[float, float, str] | None = None
    for begin_s, end_s, name in sorted(timed, key=lambda span: (span[0], -span[1])):
        inside = outer is not None and begin_s < outer[1]
        around = outer[2] if outer is not None and inside else _name_at(begin_s, marks, ends)
        parts[around] = parts.get(around, 0.0) - (end_s - begin_s)
        parts[name] = parts.get(name, 0.0) + (end_s - begin_s)
        if not inside:
            outer = (begin_s, end_s, name)
    return parts


def _name_at(moment_s: float, marks: list[tuple[str, Moment]], ends: list[float]) -> str:
    """Return the name of the mark that counts the moment."""
    return marks[1 + min(bisect.bisect_right(ends, moment_s), len(ends) - 1)][0]


def _seconds_between(begin: Moment, end: Moment) -> float:
    if isinstance(begin, torch.cuda.Event):
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    return float(end - begin)

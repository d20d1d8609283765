"""Where the time of a step goes.

1. Marks cut a step's time into parts, by name: each counts what has passed since the one before.
2. Spans are parts of their own inside of a mark's: what a pipeline stage computes between its waits.
3. Waits for communication lie inside of either, and count as `comm_s` instead.

4. What a step took stays as it was noted until somebody asks: for the sums, or for a trace (`timeline`).

On a GPU all moments are events in the stream that computes, read after the step: a wait is then how long that stream
stood still, not how long a transfer took beside it.

Example: mark at 0, spans of forward_s from 1 to 3 and of backward_s from 6 to 9, a wait from 2 to 2.5, mark("bubble_s")
at 10: forward_s is 1.5, backward_s 3, comm_s 0.5, bubble_s 5.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, TypeAlias

import torch

from shoal.comm.traffic import TRAFFIC, Noted, Spent, named

Seconds: TypeAlias = Callable[[], dict[str, float]]
"""Tells the seconds of a step by name. On a GPU it waits until the step is done."""
Moment: TypeAlias = Any
"""A reading of the clock: seconds, or an event in a GPU's stream."""


class Span(NamedTuple):
    """Some time, from one moment to another, and what it counts as."""

    name: str
    begin: Moment
    end: Moment
    micro_batch: int | None = None


class Taken:
    """A step that was taken off the clock. Called, it returns its seconds by name."""

    __slots__ = ("_calls", "began_s", "marks", "spans")

    def __init__(
        self, marks: list[tuple[str, Moment]], spans: list[Span], calls: Sequence[Noted], began_s: float
    ) -> None:
        self.marks, self.spans, self._calls = marks, spans, calls
        self.began_s = began_s
        """When its time began, by time.perf_counter."""

    def __call__(self) -> dict[str, float]:
        """Return the seconds by name. On a GPU this waits until the step is done."""
        return _added_up(self.marks, self.spans)

    @property
    def calls(self) -> list[Spent]:
        """The collectives of the step."""
        return named(self._calls)

    def since_begin_s(self, moment: Moment) -> float:
        """Return the seconds from where the step's time begins to `moment`."""
        return seconds_between(self.marks[0][1], moment)


class StepClock:
    """Measures the steps of one worker, one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._wait = _Wait(self)
        self._noted: Moment = None
        self._marks: list[tuple[str, Moment]] = []
        self._spans: list[Span] = []
        self._began_s = 0.0
        self.now: Callable[[], Moment] = time.perf_counter if self._stream is None else self._event
        """Returns this moment."""
        self.on_mark: Callable[[str], None] | None = None
        """Told the name of each mark, where somebody looks closely."""

    def _event(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def restart(self) -> None:
        """Forget all there is; the next mark counts from here."""
        now = self.now()
        self._marks, self._spans = [("", now)], []
        self._began_s = now if self._stream is None else time.perf_counter()
        self._noted = None

    def mark(self, name: str) -> None:
        """Count the time since the last mark as `name`."""
        self._marks.append((name, self.now()))
        if self.on_mark is not None:
            self.on_mark(name)

    def note(self) -> None:
        """Remember this moment for `mark_noted`; a later note takes its place."""
        self._noted = self.now()

    def mark_noted(self, before: str, after: str) -> None:
        """Count the time since the last mark as `before` up to the noted moment, and as `after` from there on."""
        if self._noted is not None:
            self._marks.append((before, self._noted))
            self._noted = None
        self.mark(after)

    def span(self, name: str, begin: Moment, end: Moment, *, micro_batch: int | None = None) -> None:
        """Count the time from `begin` to `end` as `name`, whatever is marked around it."""
        self._spans.append(Span(name, begin, end, micro_batch))

    def waiting(self) -> AbstractContextManager[None]:
        """Count what passes in a `with` block as communication that the worker waits for. May be nested."""
        return self._wait

    def take(self) -> Taken:
        """Return the step up to here, and begin the next."""
        taken = Taken(self._marks, self._spans, TRAFFIC.take_step(), self._began_s)
        self.restart()
        return taken


class _Wait(AbstractContextManager[None]):
    """What a clock is told of waits by: one for all of them, since a step may have hundreds."""

    def __init__(self, clock: StepClock) -> None:
        self._clock, self._depth = clock, 0
        self._begin: Moment = None

    def __enter__(self) -> None:
        if self._depth == 0:
            self._begin = self._clock.now()
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._clock.span("comm_s", self._begin, self._clock.now())


def _added_up(marks: list[tuple[str, Moment]], spans: list[Span]) -> dict[str, float]:
    start = marks[0][1]
    if not isinstance(start, float):  # events of a GPU, which tell times between two
        marks = [(name, seconds_between(start, moment)) for name, moment in marks]
        spans = [
            Span(name, seconds_between(start, begin), seconds_between(start, end)) for name, begin, end, _ in spans
        ]
    parts: dict[str, float] = {}
    begin_s = marks[0][1]
    for name, end_s in marks[1:]:
        parts[name] = parts.get(name, 0.0) + end_s - begin_s
        begin_s = end_s
    outer: Span | None = None
    for span in spans if len(spans) < 2 else sorted(spans, key=_outer_first):
        inside = outer is not None and span.begin < outer.end
        around = outer.name if outer is not None and inside else _name_at(span.begin, marks)
        took_s = span.end - span.begin
        parts[around] = parts.get(around, 0.0) - took_s
        parts[span.name] = parts.get(span.name, 0.0) + took_s
        if not inside:
            outer = span
    return parts


def _outer_first(span: Span) -> tuple[float, float]:
    """In the order in which they begin, the shorter of two that begin together last: it lies inside the other."""
    return span.begin, -span.end


def _name_at(moment_s: float, marks: list[tuple[str, Moment]]) -> str:
    """Return the name of the mark that counts the moment: not the first, with which the step begins."""
    for name, end_s in marks:
        if moment_s < end_s:
            return name
    return marks[-1][0]


def seconds_between(begin: Moment, end: Moment) -> float:
    """Return how long it was from one moment to the other; on a GPU, once both are past."""
    if isinstance(begin, torch.cuda.Event):
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
    return float(end - begin)

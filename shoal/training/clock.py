"""Where the time of a step goes."""

import itertools
import time
from typing import Any

import torch


class StepClock:
    """Adds up the seconds between marks, by name. On a GPU the marks are events in its stream, read after the step."""

    def __init__(self, device: torch.device) -> None:
        self._now = _gpu_event if device.type == "cuda" else time.perf_counter
        self._marks: list[tuple[str, Any]] = []
        self._noted: Any = None

    def restart(self) -> None:
        """Forget all marks; the next one counts from here."""
        self._marks = [("", self._now())]
        self._noted = None

    def mark(self, name: str) -> None:
        """Count the time since the last mark as `name`."""
        self._marks.append((name, self._now()))

    def note(self) -> None:
        """Remember this moment for `mark_noted`; a later note takes its place."""
        self._noted = self._now()

    def mark_noted(self, before: str, after: str) -> None:
        """Count the time since the last mark as `before` up to the noted moment, and as `after` from there on."""
        if self._noted is not None:
            self._marks.append((before, self._noted))
            self._noted = None
        self.mark(after)

    def read(self) -> dict[str, float]:
        """Return the seconds by name. On a GPU, waits for the last mark."""
        seconds: dict[str, float] = {}
        for (_, begin), (name, end) in itertools.pairwise(self._marks):
            seconds[name] = seconds.get(name, 0.0) + _seconds_between(begin, end)
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

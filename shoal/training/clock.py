"""Where the time of a step goes."""

import time

import torch


class StepClock:
    """Adds up the seconds between marks, by name. On a GPU the marks are events in its stream, read after the step."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event]] = []
        self._last = time.perf_counter()

    def restart(self) -> None:
        """Forget all marks; the next one counts from here."""
        self._seconds = {}
        self._events = []
        self._last = time.perf_counter()
        if self._on_gpu:
            self._record("")

    def mark(self, name: str) -> None:
        """Count the time since the last mark as `name`."""
        if self._on_gpu:
            self._record(name)
            return
        now = time.perf_counter()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._last
        self._last = now

    def move(self, source: str, target: str, seconds: float) -> None:
        """Count `seconds` of what was counted as `source` as `target` instead."""
        seconds = min(seconds, self._seconds.get(source, 0.0))
        self._seconds[source] = self._seconds.get(source, 0.0) - seconds
        self._seconds[target] = self._seconds.get(target, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Return the seconds by name. On a GPU, waits for the last mark."""
        if self._events:
            self._events[-1][1].synchronize()
            for (_, before), (name, after) in zip(self._events, self._events[1:], strict=False):
                self._seconds[name] = self._seconds.get(name, 0.0) + before.elapsed_time(after) / 1e3
            self._events = []
        return self._seconds

    def _record(self, name: str) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._events.append((name, event))

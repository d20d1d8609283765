"""The live view of a run: a progress bar in a terminal, plain lines elsewhere, fed by the run's own events."""

import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.units import format_count

_PLAIN_EVERY_S = 5.0  # one line each, where there is no terminal
_RATE_OVER_STEPS = 20  # a rate over fewer jumps too much to read


class LiveView:
    """Shows how far the run in `folder` is. Call `poll` now and then; `print` writes a line above the bar."""

    def __init__(self, folder: RunFolder, *, steps: int, unit: str, console: Console) -> None:
        self._reader = EventReader(folder.events_of(0))
        self._steps, self._unit, self._console = steps, unit, console
        self._recent: list[tuple[float, float]] = []  # (time, weight of the global batch) of the latest steps
        self._last_line = time.monotonic()
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[numbers]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=60,
        )
        self._task = self._progress.add_task(folder.name, total=steps, numbers="starting workers")

    def __enter__(self) -> "LiveView":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.poll(is_last=True)
        self._progress.stop()

    def print(self, line: str) -> None:
        """Write a line above the bar."""
        self._console.print(escape(line), highlight=False, soft_wrap=True)

    def poll(self, *, is_last: bool = False) -> None:
        """Take in the new events and show them."""
        events = [event for event in self._reader.poll() if event["kind"] in ("step", "eval")]
        for event in events:
            if event["kind"] == "eval":
                self.print(f"step {event['step']}: " + _metrics(event["metrics"]))
            else:
                self._take(event)
        steps = [event for event in events if event["kind"] == "step"]
        if steps:
            numbers = f"loss {_number(steps[-1]['loss'])}  {self._rate()}"
            self._progress.update(self._task, completed=steps[-1]["step"], numbers=numbers)
            self._plain_line(steps[-1]["step"], numbers, is_last=is_last or steps[-1]["step"] == self._steps)

    def _take(self, event: dict[str, Any]) -> None:
        self._recent.append((event["time"], event["batch_weight"]))
        del self._recent[: -_RATE_OVER_STEPS - 1]

    def _rate(self) -> str:
        """Return "3.9 k tokens/s" over the latest steps: the first of them only starts the clock."""
        elapsed_s = self._recent[-1][0] - self._recent[0][0]
        if elapsed_s <= 0:
            return f"- {self._unit}/s"
        weight = sum(weight for _, weight in self._recent[1:])
        return f"{format_count(weight / elapsed_s)} {self._unit}/s"

    def _plain_line(self, step: int, numbers: str, *, is_last: bool) -> None:
        if self._console.is_terminal or (not is_last and time.monotonic() - self._last_line < _PLAIN_EVERY_S):
            return
        self._last_line = time.monotonic()
        self.print(f"step {step}/{self._steps}  {numbers}")


def _metrics(metrics: dict[str, Any]) -> str:
    return ", ".join(f"eval {name} {_number(value)}" for name, value in metrics.items())


def _number(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, (int, float)) else "not finite"

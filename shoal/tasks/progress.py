"""How a map goes: a bar with the time left on a terminal, a plain line now and then elsewhere."""

import time
from types import TracebackType
from typing import Any, Self

from shoal.core.units import format_seconds

_LINE_S = 10.0


class Progress:
    """Shown on `console`, a rich Console; None shows nothing."""

    def __init__(self, total: int, console: Any | None) -> None:
        self._total, self._console = total, console
        self._begun_s = self._told_s = time.monotonic()
        self._first: int | None = None
        self._bar: Any = None

    def __enter__(self) -> Self:
        if self._console is not None and self._console.is_terminal:
            from rich import progress

            done = progress.TextColumn("{task.completed:,.0f} of {task.total:,.0f}{task.fields[more]}")
            columns = (progress.TextColumn("tasks"), progress.BarColumn(), done, progress.TimeRemainingColumn())
            self._bar = progress.Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("tasks", total=self._total, more="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def say(self, line: str) -> None:
        """Print a line, above the bar."""
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def update(self, done: int, *, failed: int = 0, more: str = "") -> None:
        """So many tasks are done by now, and so many of them failed."""
        if self._console is None:
            return
        if self._first is None:  # what an earlier start has done says nothing about the pace
            self._first, self._begun_s = done, time.monotonic()
        more = f", {failed:,} failed{more}" if failed else more
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done, more=more)
        elif time.monotonic() - self._told_s > _LINE_S:
            self._told_s = time.monotonic()
            left_s = time_left_s(done - self._first, self._total - done, time.monotonic() - self._begun_s)
            left = "" if left_s is None else f", {format_seconds(left_s)} left"
            self.say(f"tasks: {done:,} of {self._total:,}{more}{left}")


def time_left_s(done: int, left: int, elapsed_s: float) -> float | None:
    """Return how long the tasks that are left will take at the pace so far; None where there is none yet."""
    return elapsed_s / done * left if done > 0 else None

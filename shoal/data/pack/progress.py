"""What is said while a pack is written: a bar on a terminal, plain lines elsewhere."""

import time
from collections.abc import Callable
from typing import Any, Protocol

from shoal.core.units import format_bytes, format_seconds

_LINE_S = 10.0
_TELL_S = 0.1

Tell = Callable[[int, int], None]
"""Called with the rows and bytes that were added since."""


class Report(Protocol):
    """Who is told how it goes."""

    def say(self, line: str) -> None:
        """Tell something that a person should know."""

    def begin(self, total_bytes: int) -> None:
        """Packing begins, of about so many bytes; 0 where nobody knows."""

    def add(self, rows: int, num_bytes: int) -> None:
        """So much more has been packed."""

    def end(self) -> None:
        """It is over, well or not."""


class Quiet:
    """Tells nobody."""

    def say(self, line: str) -> None:
        """Say nothing."""

    def begin(self, total_bytes: int) -> None:
        """Show nothing."""

    def add(self, rows: int, num_bytes: int) -> None:
        """Show nothing."""

    def end(self) -> None:
        """Show nothing."""


class ConsoleReport:
    """Tells the person at `console`: a rich Console."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._rows, self._bytes, self._total = 0, 0, 0
        self._begun_s = self._told_s = time.monotonic()
        self._bar: Any = None

    def say(self, line: str) -> None:
        """Print a line, above the bar."""
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def begin(self, total_bytes: int) -> None:
        """Show a bar, on a terminal."""
        self._total, self._begun_s = total_bytes, time.monotonic()
        if self._console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("packing"), BarColumn(), TextColumn("{task.fields[said]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._bar.add_task("packing", total=total_bytes or None, said="")
            self._bar.start()

    def add(self, rows: int, num_bytes: int) -> None:
        """Move the bar; without one, print a line now and then."""
        self._rows, self._bytes = self._rows + rows, self._bytes + num_bytes
        if self._bar is not None:
            most = self._bytes if not self._total else min(self._bytes, self._total)
            self._bar.update(self._bar.task_ids[0], completed=most, said=self._said())
        elif time.monotonic() - self._told_s > _LINE_S:
            self._told_s = time.monotonic()
            self.say(f"packing: {self._said()}")

    def end(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _said(self) -> str:
        seconds = max(time.monotonic() - self._begun_s, 1e-3)
        part = f" ({self._bytes / self._total:.0%})" if self._total else ""
        rate = f"{format_bytes(self._bytes / seconds)}/s"
        return f"{self._rows:,} rows, {format_bytes(self._bytes)}{part} in {format_seconds(seconds)}, {rate}"


def console_report() -> Report:
    """Return what tells the person at stderr."""
    from rich.console import Console

    return ConsoleReport(Console(stderr=True))


class Teller:
    """Tells now and then, not at every block."""

    def __init__(self, tell: Tell) -> None:
        self._tell, self._rows, self._bytes, self._told_s = tell, 0, 0, 0.0

    def tell(self, rows: int, num_bytes: int) -> None:
        """Count so much more, and tell of it soon."""
        self._rows, self._bytes = self._rows + rows, self._bytes + num_bytes
        if time.monotonic() - self._told_s > _TELL_S:
            self.flush()

    def flush(self) -> None:
        """Tell what has not been told."""
        self._tell(self._rows, self._bytes)
        self._rows, self._bytes, self._told_s = 0, 0, time.monotonic()

"""A sweep in the terminal: its progress with the best so far, and the table of the best trials."""

import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import progress
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.core.units import format_seconds

if TYPE_CHECKING:
    from shoal.tasks.sweep_result import SweepResult, Trial

_SHOWN = 10
_PLAIN_EVERY_S = 5.0  # one line each, where there is no terminal


class Progress:
    """Shows how far a sweep is: a bar in a terminal, lines elsewhere."""

    def __init__(self, trials: int, *, console: Console) -> None:
        self._console, self._trials = console, trials
        self._begin_s = self._last_line_s = time.monotonic()
        self._before: int | None = None
        self._bar = progress.Progress(
            progress.TextColumn("[bold]trials"),
            progress.BarColumn(bar_width=24),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[best]}"),
            progress.TimeRemainingColumn(compact=True),
            progress.TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            speed_estimate_period=600,
        )
        self._task = self._bar.add_task("trials", total=trials, best="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._bar.stop()

    def show(self, result: "SweepResult") -> None:
        """Show how far it is."""
        if self._before is None:
            self._before = result.done
        said = in_short(result)
        self._bar.update(self._task, completed=result.done, best=escape(said))
        now_s = time.monotonic()
        is_due = result.done == self._trials or now_s - self._last_line_s >= _PLAIN_EVERY_S
        if not self._console.is_terminal and is_due:
            self._last_line_s = now_s
            line = f"trial {result.done}/{self._trials}  {said}{self._left(result.done, now_s)}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _left(self, done: int, now_s: float) -> str:
        """Return ", 3 min left" by the pace since this process began."""
        new = done - (self._before or 0)
        if not new or done >= self._trials:
            return ""
        return f", {format_seconds((now_s - self._begin_s) / new * (self._trials - done))} left"


def in_short(result: "SweepResult") -> str:
    """Return "best 0.31 (trial 12), 3 pruned, 1 failed"."""
    best = result.best
    words = [f"best {best.value:.6g} (trial {best.number})" if best is not None else "none yet"]
    words += [
        f"{count} {name}"
        for state, name in (("pruned", "pruned"), ("fail", "failed"))
        if (count := result.count(state))
    ]
    return ", ".join(words)


def render(result: "SweepResult", page: Path) -> RenderableType:
    """Return the table of the best trials, with what else is to be said."""
    blocks: list[RenderableType] = [Text(f"{result.done} trials of {result.file}: {in_short(result)}", style="bold")]
    ranked = result.ranked()
    if ranked:
        blocks.append(_table(ranked[:_SHOWN]))
    if result.done < result.wanted:
        blocks.append(Text(_why_fewer(result), style="yellow"))
    return Group(*blocks, Text(f"All of them: {page}", no_wrap=True, overflow="ignore"))


def _table(trials: "list[Trial]") -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    names = list(dict.fromkeys(name for trial in trials for name in trial.parameters))
    for name in ("trial", "value", *names, "time"):
        table.add_column(Text(name), justify="right")
    for trial in trials:
        values = [Text(_short(trial.parameters[name]) if name in trial.parameters else "") for name in names]
        seconds = "" if trial.seconds is None else format_seconds(trial.seconds)
        table.add_row(str(trial.number), _short(trial.value), *values, seconds)
    return table


def _why_fewer(result: "SweepResult") -> str:
    failed = [trial for trial in result.trials if trial.reason]
    if not failed:
        return f"There was nothing left to try after {result.done} trials."
    return f"{len(failed)} failed; start again to make up for them. The last: {failed[-1].reason}"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

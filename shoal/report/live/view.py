"""The live view of a run while it is trained: it redraws itself in a terminal, and prints plain lines elsewhere."""

import math
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape

from shoal.core.run_folder import RunFolder
from shoal.report.live.draw import Drawing, plain
from shoal.report.live.follow import Follower
from shoal.report.live.news import tell
from shoal.report.live.pace import Pace
from shoal.report.live.state import LiveState

_PLAIN_EVERY_S = 5.0  # one line each, where there is no terminal
_LOOK_EVERY_S = 0.25


class LiveView:
    """Shows how the run in `folder` goes. Call `poll` now and then; `print` writes a line above the view.

    `kinds` are the events that get a line of their own, also those from before the first look, if `tells_past`. `steps`
    and `unit` are the folder's where they are not given.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        steps: int | None = None,
        unit: str | None = None,
        console: Console,
        kinds: tuple[str, ...] = ("eval",),
        tells_past: bool = True,
    ) -> None:
        self._follower = Follower(folder, steps=steps, unit=unit)
        self._console, self._kinds, self._tells = console, kinds, tells_past
        self.state: LiveState | None = None
        """How the run stood at the last look."""
        self._is_drawn = console.is_terminal and not console.is_dumb_terminal
        self._live = Live(console=console, auto_refresh=False) if self._is_drawn else None
        self._pace = Pace(_LOOK_EVERY_S)
        self._last_line = -math.inf
        self._last_said = (0, False)
        """Of the last line: the step, and whether the run was over."""

    def __enter__(self) -> "LiveView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.poll(is_last=True)
        if self._live is not None:
            self._live.stop()

    def print(self, line: str) -> None:
        """Write a line above the view."""
        self._console.print(escape(line), highlight=False, soft_wrap=True)

    def poll(self, *, is_last: bool = False) -> None:
        """Take in the new events and show them, if it is time."""
        if self._console.quiet or not (self._pace.is_due or is_last):
            return
        with self._pace.look():
            self._show(self._follower.look(), is_last=is_last)

    def _show(self, state: LiveState, *, is_last: bool) -> None:
        self.state = state
        for line in self._news() if self._tells else ():
            self.print(line)
        self._tells = True
        if self._live is not None:
            self._live.update(Drawing(state), refresh=True)
        else:
            self._plain_line(state, is_last=is_last)

    def _news(self) -> Iterator[str]:
        told: list[dict[str, Any]] = [event for event in self._follower.news if event["kind"] in self._kinds]
        return (line for event in told if (line := tell(event)))

    def _plain_line(self, state: LiveState, *, is_last: bool) -> None:
        said = (state.step, state.is_over)
        is_end = is_last or state.is_over or state.step == state.steps
        if said != self._last_said and (is_end or time.monotonic() - self._last_line >= _PLAIN_EVERY_S):
            self._last_line, self._last_said = time.monotonic(), said
            self.print(plain(state))

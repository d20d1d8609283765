"""Watching a run from elsewhere: the live view of one that goes on, or has ended, read from its folder alone."""

import time

from rich.console import Console

from shoal.core.run_folder import RunFolder
from shoal.report.live.follow import Follower
from shoal.report.live.state import LiveState
from shoal.report.live.view import LiveView

KINDS = ("eval", "hang", "loss", "joined", "checkpoint", "error")
"""The events that get a line: whoever watches does not see what the workers print."""
_TICK_S = 0.1


def look_once(folder: RunFolder) -> LiveState:
    """Return how the run stands now."""
    return Follower(folder).look()


def watch(folder: RunFolder, console: Console) -> None:
    """Show the run on `console` until it has ended; one whose job was pre-empted, and is requeued, has not.

    Ctrl-C leaves the run as it is. A run that was cut off never says that it ended: the view then says since when
    nothing has been written.
    """
    with LiveView(folder, console=console, kinds=KINDS, tells_past=False) as view:
        while True:
            view.poll()
            if view.state is not None and view.state.is_over and not view.state.goes_on:
                return
            time.sleep(_TICK_S)

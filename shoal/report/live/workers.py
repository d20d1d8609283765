"""What each worker of a run is doing, told from the logs of all: a worker's own log does not say that it is late.

1. What it has said itself counts first: that it failed, stopped or is done.
2. Then what others said of it: that it is lost, was ended as asked, or holds them up, which makes them wait.
3. Else its last step is held against that of the worker that is furthest: late is one that was done with its last step
   well before the other was, and lies two steps back or more.
4. Who has written nothing for long, while the others did, is silent.
"""

from collections.abc import Collection, Sequence

from shoal.core.units import format_seconds
from shoal.report.live import state as states
from shoal.report.live.log import LiveLog

_LATE_STEPS = 2
_LATE_S = 1.0
_LATE_TIMES = 3.0
"""Late is who is that many of its steps behind, and a second at least: logs are not read all at once."""
_SILENT_TIMES = 10.0
"""The same of one that writes nothing at all: a late worker writes its steps, if later."""
_STOPPED = "Stopped:"
"""How the last words of a worker begin that was asked to stop."""


def furthest(logs: Sequence[LiveLog]) -> LiveLog | None:
    """Return the log of the worker that has done the most steps; of several, of the first."""
    best: LiveLog | None = None
    for log in logs:
        if log.last is not None and (best is None or best.last is None or log.last.number > best.last.number):
            best = log
    return best


def describe(
    log: LiveLog,
    front: LiveLog | None,
    *,
    lost: Collection[int],
    ended: Collection[int] = (),
    blamed: Collection[int],
    is_over: bool,
) -> tuple[str, str]:
    """Return the state of a worker, one of `live_state.STATES`, and the same in words."""
    at = f"step {log.last.number:,}" if log.last else ""
    where = f" at {at}" if at else " before its first step"
    if log.rank in lost:
        return (states.STOPPED, f"ended{where}, as asked") if log.rank in ended else (states.LOST, f"lost{where}")
    if log.error:
        is_stopped = log.error.startswith(_STOPPED)
        return (states.STOPPED, f"stopped{where}") if is_stopped else (states.FAILED, f"failed{where}: {log.error}")
    if log.is_ended:
        return states.DONE, f"done, {at}" if at else "done"
    if is_over:
        return states.STOPPED, f"ended{where}"
    if blamed:
        return (
            (states.BLAMED, f"holds the others up{where}") if log.rank in blamed else (states.WAITING, f"waits{where}")
        )
    return _by_steps(log, front, at)


def _by_steps(log: LiveLog, front: LiveLog | None, at: str) -> tuple[str, str]:
    if log.last is None:
        return states.STARTING, "starting" if log.is_started else "not started yet"
    if front is None or front.last is None:
        return states.RUNNING, at
    behind, behind_s = front.last.number - log.last.number, front.last.time_s - log.last.time_s
    if behind < _LATE_STEPS or behind_s < max(_LATE_S, _LATE_TIMES * log.last.step.total_s):
        return states.RUNNING, at
    heard_s = (front.last_time_s or 0.0) - (log.last_time_s or 0.0)
    if heard_s > _SILENT_TIMES * max(_LATE_S, log.last.step.total_s):
        return states.SILENT, f"silent for {format_seconds(heard_s)}, {at}"
    return states.LATE, f"late: {at}, {behind:,} behind"

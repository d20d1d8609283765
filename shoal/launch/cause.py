"""Why a run failed: among all the workers' last words, the first cause, not its echoes.

When one worker fails, the others fail after it because their collectives break. The cause is, in this order:

0. none, where lost workers were replaced and the run has come to its end;
1. a worker that was killed by a signal that we did not send;
2. the earliest error that is not the echo of another worker's (`PeerLost`); then, one that was killed before, and
   without which the others had gone on;
3. a worker that left without a word;
4. the earliest echo: then the cause lies on another host.

Of each log only the end is read: it may have millions of lines, and the time of a job may be nearly over.
"""

import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shoal.core import errors
from shoal.core.errors import ShoalError, WorkerFailed
from shoal.core.events import last_events
from shoal.core.run_folder import RunFolder
from shoal.launch.local import Worker


@dataclass(frozen=True)
class LastWords:
    """What a worker has said last of itself."""

    errors: tuple[dict[str, Any], ...]
    """The events of kind error: none where it went on, or left without a word."""
    has_ended: bool
    """Whether it has come to the end of the run."""
    step: int | None
    """Its last step; None: before the first."""


def last_words(folder: RunFolder, ranks: Iterable[int]) -> dict[int, LastWords]:
    """Return what each of the workers has said last."""
    found = {}
    for rank in ranks:
        events = last_events(folder.events_of(rank))
        found[rank] = LastWords(
            errors=tuple(event for event in events if event["kind"] == "error"),
            has_ended=any(event["kind"] == "end" for event in events),
            step=next((event["step"] for event in reversed(events) if event["kind"] == "step"), None),
        )
    return found


def find_cause(folder: RunFolder, workers: list[Worker]) -> ShoalError | None:
    """Return why the run failed, or None if every worker did all it had to."""
    if workers and all(worker.is_done for worker in workers):
        return None
    return cause_of(last_words(folder, [worker.rank for worker in workers]), workers)


def cause_of(words: Mapping[int, LastWords], workers: list[Worker]) -> ShoalError | None:
    """Return why the run of `workers` failed, by what each has said last; None if none failed."""
    killed = [w for w in workers if w.exit_code is not None and w.exit_code < 0 and not w.is_ended_by_us]
    killed.sort(key=lambda worker: worker.is_lost)
    if killed and not killed[0].is_lost:
        return _killed(killed[0], words[killed[0].rank])
    said = [(event["time"], rank, event) for rank, last in words.items() for event in last.errors]
    said.sort(key=lambda item: (item[2]["type"] == "PeerLost", item[0]))
    if said and said[0][2]["type"] != "PeerLost":
        return _raised(said[0][1], said[0][2])
    if killed:
        return _killed(killed[0], words[killed[0].rank])
    for worker in workers:
        last = words[worker.rank]
        if not worker.is_ended_by_us and not last.has_ended and not last.errors:
            return WorkerFailed(
                f"worker {worker.rank} left with exit code {worker.exit_code} before the end of the run."
            )
    return _raised(said[0][1], said[0][2]) if said else None


def _killed(worker: Worker, last: LastWords) -> WorkerFailed:
    where = f"after step {last.step}" if last.step is not None else "before its first step"
    name = signal.Signals(-(worker.exit_code or 0)).name
    hint = " If nobody did that, the machine ran out of memory (dmesg tells)." if name == "SIGKILL" else ""
    return WorkerFailed(f"worker {worker.rank} (pid {worker.process.pid}) was killed by {name} {where}.{hint}")


def _raised(rank: int, event: dict[str, Any]) -> ShoalError:
    kind = getattr(errors, str(event["type"]), None)
    if isinstance(kind, type) and issubclass(kind, ShoalError):
        return kind(event["message"])
    return WorkerFailed(f"worker {rank} raised {event['type']}: {event['message']}", details=str(event["traceback"]))

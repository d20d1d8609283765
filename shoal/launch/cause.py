"""Why a run failed: among all the workers' last words, the first cause, not its echoes.

When one worker fails, the others fail after it because their collectives break. The cause is, in this order:

0. none, where lost workers were replaced and the run has come to its end;
1. a worker that was killed by a signal that we did not send;
2. the earliest error that is not the echo of another worker's (`PeerLost`); then, one that was killed before, and
   without which the others had gone on;
3. a worker that left without a word;
4. the earliest echo: then the cause lies on another host.
"""

import signal
from typing import Any

from shoal.core import errors
from shoal.core.errors import ShoalError, WorkerFailed
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.launch.local import Worker


def find_cause(folder: RunFolder, workers: list[Worker]) -> ShoalError | None:
    """Return why the run failed, or None if every worker did all it had to."""
    if workers and all(worker.is_done for worker in workers):
        return None
    logs = {worker.rank: EventReader(folder.events_of(worker.rank)).poll() for worker in workers}
    killed = [w for w in workers if w.exit_code is not None and w.exit_code < 0 and not w.is_ended_by_us]
    killed.sort(key=lambda worker: worker.is_lost)
    if killed and not killed[0].is_lost:
        return _killed(killed[0], logs[killed[0].rank])
    words = [(event["time"], rank, event) for rank, log in logs.items() for event in log if event["kind"] == "error"]
    words.sort(key=lambda item: (item[2]["type"] == "PeerLost", item[0]))
    if words and words[0][2]["type"] != "PeerLost":
        return _raised(words[0][1], words[0][2])
    if killed:
        return _killed(killed[0], logs[killed[0].rank])
    for worker in workers:
        if not worker.is_ended_by_us and not any(event["kind"] in ("end", "error") for event in logs[worker.rank]):
            return WorkerFailed(
                f"worker {worker.rank} left with exit code {worker.exit_code} before the end of the run."
            )
    return _raised(words[0][1], words[0][2]) if words else None


def _killed(worker: Worker, log: list[dict[str, Any]]) -> WorkerFailed:
    steps = [event["step"] for event in log if event["kind"] == "step"]
    where = f"after step {steps[-1]}" if steps else "before its first step"
    name = signal.Signals(-(worker.exit_code or 0)).name
    hint = " If nobody did that, the machine ran out of memory (dmesg tells)." if name == "SIGKILL" else ""
    return WorkerFailed(f"worker {worker.rank} (pid {worker.process.pid}) was killed by {name} {where}.{hint}")


def _raised(rank: int, event: dict[str, Any]) -> ShoalError:
    kind = getattr(errors, str(event["type"]), None)
    if isinstance(kind, type) and issubclass(kind, ShoalError):
        return kind(event["message"])
    return WorkerFailed(f"worker {rank} raised {event['type']}: {event['message']}", details=str(event["traceback"]))

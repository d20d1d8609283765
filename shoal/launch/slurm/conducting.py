"""The one process of a job that starts its workers, by srun, and says how that ended. It runs on the first node.

1. Note in slurm/starts.jsonl that the job was started. If it was before, put the events of then aside: the workers go
   on from the last checkpoint by themselves.
2. Start the workers, one task each, who meet at the address by which Slurm itself reaches this node, on a free port.
3. A notice (USR1, TERM) is passed on to them; not before each has begun, for until then it would kill them.
4. When all have ended, find out how: done, stopped in order, or failed (cause.py). A run that was stopped, or that has
   lost a worker without another fault, can go on: the exit code is 75, on which the batch script requeues its job.
   Not so where `MOST_IN_VAIN` starts in a row have brought no new checkpoint: the next would bring none either.

Example: job 12 begins at step 0, is pre-empted after step 340 with a checkpoint, and ends with 75. Slurm starts it an
hour later, on other nodes: starts.jsonl has a second line, with step 340, and the workers go on with step 341.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

from shoal.core.errors import PeerLost, ShoalError, SlurmError, Stopped, WorkerFailed
from shoal.core.events import EventReader
from shoal.core.notice import read_notice_s
from shoal.core.run_folder import RunFolder
from shoal.launch.cause import find_cause
from shoal.launch.local import Worker
from shoal.launch.requests import Requests, stop_requests
from shoal.launch.slurm.commands import call
from shoal.launch.slurm.sbatch import CANCELLED
from shoal.launch.starting import PYTHON, Process, worker_environment

STARTS = "starts.jsonl"
MOST_IN_VAIN = 4
"""How many starts in a row may bring no new checkpoint: nodes do fail one after the other, but seldom 4 times."""
PATIENCE_S = 60.0
"""How long srun may take to end once a worker has said that it failed: it waits for minutes for tasks of a node that is
dead, until the controller has noticed."""
_TICK_S = 0.1


@dataclass(frozen=True)
class Start:
    """One start of a job: when, and after which step it went on."""

    job: str
    time: float
    step: int


@dataclass(frozen=True)
class Ending:
    """How the workers of one start have ended."""

    status: str
    """done, stopped or failed."""
    error: ShoalError | None
    can_go_on: bool

    @property
    def exit_code(self) -> int:
        """That of the job: 75 only if it is to be requeued, or was cancelled in order."""
        if self.error is None:
            return 0
        if self.can_go_on or isinstance(self.error, Stopped):
            return Stopped("").exit_code
        return self.error.exit_code or 1


def conduct(
    folder: RunFolder,
    *,
    workers: int,
    last_step: Callable[[], int],
    conclude: Callable[[str, str], None],
    env: Mapping[str, str] = os.environ,
) -> Ending:
    """Train the run in `folder` as far as this start of the job comes, and return how it ended.

    `last_step` returns the step of the last checkpoint, 0 without one; `conclude` writes down status and message.
    """
    with stop_requests() as requests:
        starts = _note_start(folder.slurm / STARTS, Start(env.get("SLURM_JOB_ID", ""), time.time(), last_step()))
        if len(starts) > 1:
            folder.begin_attempt(step=starts[-1].step, workers=workers)
        step = subprocess.Popen(step_command(folder.path, workers, env), env=_environment(env))
        try:
            has_begun = _watch(step, folder, workers, requests)
        finally:
            if step.poll() is None:
                step.kill()
                step.wait()
    ending = judge(folder, workers=workers, code=step.returncode, has_begun=has_begun)
    steps = [start.step for start in starts]
    if ending.can_go_on and _in_vain(steps, last_step()):
        why = f"{MOST_IN_VAIN} starts of the job in a row brought no new checkpoint after step {steps[-1]}"
        ending = Ending("failed", WorkerFailed(f"{why}. The last of them: {ending.error}"), can_go_on=False)
    conclude(ending.status, str(ending.error or ""))
    return ending


def judge(folder: RunFolder, *, workers: int, code: int, has_begun: bool) -> Ending:
    """Return how the workers have ended, by their last words and by srun's exit code."""
    logs = {rank: EventReader(folder.events_of(rank)).poll() for rank in range(workers)}
    if code == 0 and all(any(event["kind"] == "end" for event in log) for log in logs.values()):
        return Ending("done", None, can_go_on=False)
    seen = [Worker(rank, cast(Process, None), exit_code=abs(code)) for rank in range(workers)]  # elsewhere
    error = find_cause(folder, seen) or WorkerFailed(f"srun ended with exit code {code} before the end of the run.")
    is_cancelled = (folder.slurm / CANCELLED).exists()
    has_spoken = any(event["kind"] == "error" and event["type"] != "PeerLost" for log in logs.values() for event in log)
    is_lost = has_begun and (isinstance(error, PeerLost) or not has_spoken)
    if isinstance(error, Stopped):
        return Ending("stopped", error, can_go_on=not is_cancelled)
    return Ending("stopped" if is_lost else "failed", error, can_go_on=is_lost and not is_cancelled)


def _in_vain(steps: Sequence[int], now: int) -> bool:
    """Return whether the last starts, which went on after `steps`, brought nothing: the last checkpoint is `now`."""
    return len(steps) >= MOST_IN_VAIN and set(steps[-MOST_IN_VAIN:]) == {now}


def step_command(folder: Path, workers: int, env: Mapping[str, str]) -> list[str]:
    """Return the command that starts the workers, as the tasks of this job."""
    cpus = env.get("SLURM_CPUS_PER_TASK")  # srun does not take it from the job (since Slurm 22.05)
    options = [f"--ntasks={workers}", "--label", "--kill-on-bad-exit=0", "--unbuffered"]
    options += [f"--cpus-per-task={cpus}"] if cpus else []
    return ["srun", *options, *PYTHON, "worker", str(folder)]


def _note_start(path: Path, start: Start) -> list[Start]:
    """Append `start`, and return all starts of its job."""
    with path.open("a") as file:
        file.write(json.dumps(asdict(start)) + "\n")
    starts = []
    for line in path.read_text().splitlines():
        try:
            starts.append(Start(**json.loads(line)))
        except (ValueError, TypeError):
            continue  # a line that was cut off
    return [one for one in starts if one.job == start.job]


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of the workers: where they meet, and how many threads each has."""
    address = "127.0.0.1" if env.get("SLURM_JOB_NUM_NODES", "1") == "1" else _address(env)
    threads = int(env.get("SLURM_CPUS_PER_TASK", "1"))
    return worker_environment(env, threads=threads, host=address, port=_free_port(address))


def _address(env: Mapping[str, str]) -> str:
    """Return the address by which Slurm reaches this node: one that the others can reach, too."""
    node = env.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        said = call(["scontrol", "show", "node", node, "--oneliner"])
    except SlurmError:
        return node
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else node


def _free_port(address: str) -> int:
    try:
        with socket.create_server((address, 0)) as server:
            return int(server.getsockname()[1])
    except OSError:  # the address is that of another: srun's first task says so better than we can
        with socket.create_server(("127.0.0.1", 0)) as server:
            return int(server.getsockname()[1])


def _watch(step: "subprocess.Popen[bytes]", folder: RunFolder, workers: int, requests: Requests) -> bool:
    """Return when srun has ended, or waits for what does not come: whether every worker had begun.

    A notice is passed on once.
    """
    readers = [EventReader(folder.events_of(rank)) for rank in range(workers)]
    waiting = set(range(workers))
    deadline_s: float | None = None
    is_passed_on = False
    while step.poll() is None and (deadline_s is None or time.monotonic() < deadline_s):
        for rank, reader in enumerate(readers):
            kinds = {event["kind"] for event in reader.poll()}
            waiting -= {rank} if "start" in kinds else set()
            if "error" in kinds and deadline_s is None:
                deadline_s = time.monotonic() + max(PATIENCE_S, read_notice_s())
        if requests.numbers and not waiting and not is_passed_on:
            is_passed_on = True
            step.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(_TICK_S)
    return not waiting

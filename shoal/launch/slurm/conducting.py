"""The one process of a job that starts its workers, by srun, and says how that ended. It runs on the first node.

1. Note in slurm/starts.jsonl that the job was started. If it was before, put the events of then aside: the workers go
   on from the last checkpoint by themselves.
2. Listen at the address by which Slurm itself reaches this node, on a free port. Start a process on each node, in the
   order of their switches (order.py), that starts and watches its workers (hosting.py), and host the store in which all
   of them meet.
3. A notice (USR1, TERM) is passed on to them; not before each has begun, for until then it would kill them.
4. A worker that is lost is replaced on its node. A node that is lost takes its workers with it, and those of the others
   go on, if they hold the whole model.
5. When all have ended, find out how: done, stopped in order, or failed (ending.py). A run that was stopped, or that has
   lost more than it can do without, can go on: the exit code is 75, on which the batch script requeues its job.
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
from functools import partial
from pathlib import Path

from shoal.comm.listening import listen
from shoal.core.errors import ConfigError, SlurmError, WorkerFailed
from shoal.core.events import EventReader
from shoal.core.files import write_whole
from shoal.core.looks import Looks
from shoal.core.run_folder import RunFolder
from shoal.launch.requests import Requests, stop_requests
from shoal.launch.slurm.commands import call
from shoal.launch.slurm.ending import Ending, judge
from shoal.launch.slurm.hosting import code_command
from shoal.launch.slurm.order import neighbours_first
from shoal.launch.slurm.topology import hosts, read_switches
from shoal.launch.starting import worker_environment

STARTS, HOSTS = "starts.jsonl", "hosts.txt"
MOST_IN_VAIN = 4
"""How many starts in a row may bring no new checkpoint: nodes do fail one after the other, but seldom 4 times."""
LATEST_LOOK_S = 5.0
"""How seldom the workers' events are looked at: there may be hundreds, in files that all nodes share."""
PATIENCE_S = 20.0
"""How long srun may take to end once the workers of one node have: it waits for minutes for those of a node that is
dead, until the controller has noticed."""
_TICK_S = 0.1


@dataclass(frozen=True)
class Start:
    """One start of a job: when, and after which step it went on."""

    job: str
    time: float
    step: int


def conduct(
    folder: RunFolder,
    *,
    workers: int,
    timeout_s: float,
    last_step: Callable[[], int],
    conclude: Callable[[Ending], None],
    stages: int = 1,
    goes_on: bool = True,
    starts_again: bool = True,
    env: Mapping[str, str] = os.environ,
) -> Ending:
    """Train the run in `folder` as far as this start of the job comes, and return how it ended.

    `timeout_s` is how long workers wait for each other; `last_step` returns the step of the last checkpoint, 0 without
    one; `conclude` writes down how it ended, in no time: a job that goes on is requeued only after that; `stages` are
    those of the pipeline; `goes_on`: whether workers go on when they lose one; `starts_again`: whether another start of
    the job can take the run on from there.
    """
    with stop_requests() as requests:
        starts = _note_start(folder.slurm / STARTS, Start(env.get("SLURM_JOB_ID", ""), time.time(), last_step()))
        if len(starts) > 1:
            folder.begin_attempt(step=starts[-1].step, workers=workers)
        hosts_file = _write_hosts(folder, stages, env)
        command = step_command(folder, workers, env, is_ordered=hosts_file is not None)
        heard = _Heard(folder, workers)
        address = _address(env)
        try:
            server = listen(address)
        except ConfigError as error:
            ending = Ending("failed", error, can_go_on=False)
        else:
            told = _environment(env, address, server.getsockname()[1]) | _ordered_by(hosts_file)
            meet = partial(_News, server, heard, awaited=workers if goes_on else 0, timeout_s=timeout_s)
            code, news = _run(command, told, meet, requests)
            how = {"has_begun": news.has_begun(), "is_finished": news.is_finished(), "starts_again": starts_again}
            ending = judge(folder, workers=workers, code=code, **how)
    steps = [start.step for start in starts]
    if ending.can_go_on and _in_vain(steps, last_step()):
        why = f"{MOST_IN_VAIN} starts of the job in a row brought no new checkpoint after step {steps[-1]}"
        ending = Ending("failed", WorkerFailed(f"{why}. The last of them: {ending.error}"), can_go_on=False)
    conclude(ending)
    return ending


def _in_vain(steps: Sequence[int], now: int) -> bool:
    """Return whether the last starts, which went on after `steps`, brought nothing: the last checkpoint is `now`."""
    return len(steps) >= MOST_IN_VAIN and set(steps[-MOST_IN_VAIN:]) == {now}


def step_command(folder: RunFolder, workers: int, env: Mapping[str, str], *, is_ordered: bool = False) -> list[str]:
    """Return the command that starts a process on each node of this job; `is_ordered`: as a file lists the nodes."""
    nodes = int(env.get("SLURM_JOB_NUM_NODES", "1"))
    # --no-kill: if a node is lost, the others go on.
    options = [f"--ntasks={nodes}", "--ntasks-per-node=1", "--no-kill", "--kill-on-bad-exit=0", "--unbuffered"]
    if cpus := env.get("SLURM_CPUS_PER_TASK"):  # which srun does not take from the job (since Slurm 22.05)
        options.append(f"--cpus-per-task={int(cpus) * -(-workers // nodes)}")
    options += ["--distribution=arbitrary"] if is_ordered else []
    return ["srun", *options, *code_command(folder), "host", str(folder.path)]


def _write_hosts(folder: RunFolder, stages: int, env: Mapping[str, str]) -> Path | None:
    """Write down in which order nodes have workers; None where it is as Slurm does it by itself."""
    nodes = hosts(env.get("SLURM_JOB_NODELIST", ""))
    if len(nodes) < 2:
        return None
    order = neighbours_first(nodes, read_switches(), stage_nodes=len(nodes) // stages)
    if order == nodes:
        return None
    path = folder.slurm / HOSTS
    write_whole(path, "".join(f"{node}\n" for node in order))
    print(f"The nodes in the order of their switches: {', '.join(order)}", flush=True)
    return path


def _ordered_by(hosts_file: Path | None) -> dict[str, str]:
    return {} if hosts_file is None else {"SLURM_HOSTFILE": str(hosts_file)}


def _note_start(path: Path, start: Start) -> list[Start]:
    """Append `start`, and return all starts of its job."""
    before = path.read_text() if path.exists() else ""
    is_cut_off = bool(before) and not before.endswith("\n")  # a line whose writer was killed
    ours = json.dumps(asdict(start))
    with path.open("a") as file:
        file.write("\n" * is_cut_off + ours + "\n")
    starts = []
    for line in [*before.splitlines(), ours]:
        try:
            starts.append(Start(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return [one for one in starts if one.job == start.job]


def _environment(env: Mapping[str, str], address: str, port: int) -> dict[str, str]:
    """Return the environment of the workers: where they meet, and how many threads each has."""
    return worker_environment(env, threads=int(env.get("SLURM_CPUS_PER_TASK", "1")), host=address, port=port)


def _run(
    command: Sequence[str], env: Mapping[str, str], meet: Callable[[], "_News"], requests: Requests
) -> tuple[int, "_News"]:
    """Start the workers by srun, watch them, and return its exit code with what they have said in the store.

    `meet` hosts that store; it imports torch for it, which the workers do at the same time.
    """
    step = subprocess.Popen(command, env=env)
    try:
        news = meet()
        _watch(step, news, requests)
    finally:
        if step.poll() is None:
            step.kill()
            step.wait()
    return step.returncode, news


def _address(env: Mapping[str, str]) -> str:
    """Return the address by which Slurm reaches this node: one that the others can reach, too."""
    if env.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return "127.0.0.1"
    node = env.get("SLURMD_NODENAME") or socket.gethostname()
    try:
        said = call(["scontrol", "show", "node", node, "--oneliner"])
    except SlurmError:
        return node
    found = re.search(r"\bNodeAddr=(\S+)", said)
    return found[1] if found else node


class _Heard:
    """Who has begun in this start, by the workers' logs."""

    def __init__(self, folder: RunFolder, workers: int) -> None:
        """Made before the workers are started: what is in their logs by then is of earlier starts."""
        self._readers = {rank: EventReader(folder.events_of(rank)) for rank in range(workers)}
        for reader in self._readers.values():
            reader.skip()

    def have_all_begun(self) -> bool:
        """Return whether nobody is waited for; who has begun is not looked at again."""
        for rank, reader in list(self._readers.items()):
            if any(event["kind"] == "start" for event in reader.poll()):
                del self._readers[rank]
        return not self._readers


class _News:
    """The store of this start, and what the workers, and those that watch them on the nodes, say in it.

    Not worker 0 hosts it: by the time that it begins, a port that was free here may be another's.
    """

    def __init__(self, server: socket.socket, heard: _Heard, *, awaited: int, timeout_s: float) -> None:
        """`awaited`: how many workers the first of them wait for, where they go on when they lose one; else 0."""
        from shoal.comm import members, store  # imports torch

        self._keys, self._members, self._heard = (
            members,
            members.members_of(store.serve(server, timeout_s=timeout_s)),
            heard,
        )
        if awaited:
            members.await_members(self._members, members.first_names(range(awaited)))

    def has_begun(self) -> bool:
        """Return whether every worker has begun, or those that have go on without the others."""
        return self._keys.last_generation(self._members) is not None or self._heard.have_all_begun()

    def is_finished(self) -> bool:
        """Return whether the workers have come to the end of the run."""
        return bool(self._members.check([self._keys.FINISHED]))

    def has_ended(self) -> bool:
        """Return whether the workers of a node have ended: those of the others do so, too."""
        return bool(self._members.add(self._keys.ENDED, 0) > 0)


def _watch(step: "subprocess.Popen[bytes]", news: _News, requests: Requests) -> None:
    """Return when srun has ended, or waits for what does not come. A notice is passed on once."""
    looks = Looks(_TICK_S, LATEST_LOOK_S)
    deadline_s: float | None = None
    is_passed_on = has_begun = False
    while step.poll() is None and (deadline_s is None or time.monotonic() < deadline_s):
        if not has_begun and looks.is_due():
            has_begun = news.has_begun()
        if deadline_s is None and news.has_ended():
            deadline_s = time.monotonic() + PATIENCE_S
        if requests.numbers and has_begun and not is_passed_on:
            is_passed_on = True
            step.send_signal(signal.SIGUSR1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            step.wait(_TICK_S)

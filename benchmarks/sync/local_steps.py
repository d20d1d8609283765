"""Local steps over slow links beside bare DDP, in one run: bytes on the wire and seconds until the same held-out loss.

    python benchmarks/sync/local_steps.py [--rate 100mbit --hosts 4 --steps 30] [--local-steps 12 --codecs int8 none]

Hosts are network namespaces of this machine with shaped links (tests/support/hosts.py), so it needs root, and Linux. It
takes less than 5 minutes.

1. All train examples/gpt.py from the same parameters on the same global batches, one after the other: plain DDP over
   Gloo first, for `--steps` steps. What it has come to then is the loss that the others must reach.
2. The loss is that over 32 windows of text that is never trained on: packages of Python's standard library, of which
   the job reads only the modules beside them. DDP is looked at after every second step, local steps after each meeting,
   where all workers hold the same parameters. The clock stands still meanwhile.
3. Bytes are those that have left a host's link, headers and all (as in wire_bytes.py), and seconds those of the slowest
   worker; both from the first step on, when models are built, alike, and links are there.

Exit 1: less than 20 times fewer bytes, or less than 5 times less time, in one of the settings.
"""

import argparse
import json
import os
import statistics
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script: shoal/, tests/ and benchmarks/ are there

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.wire_bytes import left
from shoal.comm.group import all_reduce_sum, joined
from shoal.comm.rank import Rank, read_rank
from shoal.comm.store import connect, host_store
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import OUTER, Sync
from shoal.training.jobfile import load_job
from shoal.training.loader import open_loader
from shoal.training.opening import open_run
from shoal.training.run import Run
from tests.support.hosts import Hosts, hosts, why_not

CPU = torch.device("cpu")
JOB = Path(__file__).parents[2] / "examples" / "gpt.py"
TIMEOUT_S = 600.0
FEWER_BYTES, LESS_TIME = 20.0, 5.0
WINDOWS, WINDOW_BYTES = 32, 128
HELD_OUT = ("email", "http", "json", "logging")
LOOK_STEPS = 2
"""After how many steps DDP is looked at."""
MOST = 4
"""How many times as many steps as DDP others may take."""


@dataclass(frozen=True)
class Mark:
    """How far a training was when it was looked at."""

    step: int
    loss: float
    seconds: float
    """Of the slowest worker, since the first step began."""
    sent_bytes: float
    """By a worker, on average."""


class Looking:
    """Looks at a training from time to time. Opened by every worker, right before its first step."""

    def __init__(self, rank: Rank) -> None:
        self._rank, self._windows = rank, held_out()[rank.index :: rank.workers]
        self.marks: list[Mark] = []
        self._seconds = 0.0
        self._told(0.0)  # all begin together
        self._sent = left()["bytes"]
        self._since_s = time.perf_counter()

    def look(self, step: int, model: nn.Module) -> float:
        """Return the loss after `step`, and note it. Called by every worker; the time that it takes is not counted."""
        self._seconds += time.perf_counter() - self._since_s
        sent = left()["bytes"] - self._sent
        with torch.no_grad():
            logits = model(self._windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), self._windows[:, 1:].flatten(), reduction="sum").item()
        losses, seconds, bytes_sent = self._told(loss, self._seconds, sent)
        self.marks.append(
            Mark(step, sum(losses) / (WINDOWS * WINDOW_BYTES), max(seconds), statistics.fmean(bytes_sent))
        )
        self._since_s = time.perf_counter()
        return self.marks[-1].loss

    def _told(self, *values: float) -> list[list[float]]:
        """Return what all workers say, value by value."""
        rows = torch.zeros(len(values), self._rank.workers, dtype=torch.float64)
        rows[:, self._rank.index] = torch.tensor(values, dtype=torch.float64)
        all_reduce_sum(rows).wait()
        found: list[list[float]] = rows.tolist()
        return found


def held_out() -> Tensor:
    """Return windows of text that the job does not train on, evenly over it, each with the byte that follows."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for name in HELD_OUT for path in sorted((folder / name).glob("*.py")))
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    begins = [index * (len(text) - WINDOW_BYTES - 1) // WINDOWS for index in range(WINDOWS)]
    return torch.stack([numbers[begin : begin + WINDOW_BYTES + 1] for begin in begins])


def bare_steps(job: Job, rank: Rank, model: DistributedDataParallel) -> Iterator[nn.Module]:
    """Yield the model after each step of bare DDP."""
    optimizer = job.optimizer(list(model.parameters()))
    schedule = job.schedule(optimizer) if job.schedule else None
    for part in open_loader(job, Plan(mesh=Mesh(replicate=rank.workers)), index=rank.index, first_step=1, device=CPU):
        loss = job.loss(call_model(model, job, part.batch), part.batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm or float("inf"))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        yield model.module


def own_steps(run: Run) -> Iterator[nn.Module]:
    """Yield the model after each step of a run."""
    with closing(run.batches()) as batches:
        for batch in batches:
            run.step(batch)
            yield run.model


def look_at(models: Iterator[nn.Module], looking: Looking, *, every: int, target: float) -> None:
    """Train on until the loss, looked at after `every` so many steps, is as low as `target`."""
    for step, model in enumerate(models, start=1):
        if step % every == 0 and looking.look(step, model) <= target:
            return


def worker(folder: Path, *, steps: int, every: int, target: float, is_bare: bool) -> None:
    """Be one worker; worker 0 writes down what was seen."""
    torch.set_num_threads(1)
    rank = read_rank()
    assert rank is not None
    job, store = load_job(JOB).with_steps(steps), connect(rank, timeout_s=TIMEOUT_S)
    if is_bare:
        with joined(rank, store, device=CPU, timeout_s=TIMEOUT_S):
            torch.manual_seed(job.seed)
            model = DistributedDataParallel(job.model(), gradient_as_bucket_view=True)
            looking = Looking(rank)
            look_at(bare_steps(job, rank, model), looking, every=every, target=target)
            del model
    else:
        run_folder = RunFolder(folder)
        log = EventLog(run_folder.events_of(rank.index))
        with open_run(job, run_folder, rank=rank, store=store, log=log) as run:
            looking = Looking(rank)
            look_at(own_steps(run), looking, every=every, target=target)
    if rank.index == 0:
        (folder / "marks.json").write_text(json.dumps([asdict(mark) for mark in looking.marks]))


def measure(cluster: Hosts, sync: Sync | None, *, steps: int, every: int, target: float, folder: Path) -> list[Mark]:
    """Train on all hosts by `sync`, or by bare DDP, and return how it went."""
    run_folder = RunFolder.create(folder, None, stem="run")
    write_toml(run_folder.plan_toml, Plan(mesh=Mesh(replicate=cluster.count), sync=sync or Sync(), timeout_s=300))
    store, port = host_store(host=cluster.machine, timeout_s=TIMEOUT_S)
    told = {"steps": steps, "every": every, "target": target, "is_bare": sync is None}
    command = [sys.executable, "-W", "ignore", __file__, "--worker", str(run_folder.path), json.dumps(told)]
    common: dict[str, object] = {
        "WORLD_SIZE": cluster.count,
        "LOCAL_WORLD_SIZE": 1,
        "LOCAL_RANK": 0,
        "OMP_NUM_THREADS": 1,
    }
    common |= {"MASTER_ADDR": cluster.machine, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    processes = []
    for index in range(cluster.count):
        env = os.environ | {name: str(value) for name, value in {**common, "RANK": index}.items()}
        processes.append(cluster.start(index, command, env=env))
    for process in processes:
        if process.wait(TIMEOUT_S):
            raise SystemExit("a worker failed")
    del store
    return [Mark(**mark) for mark in json.loads((run_folder.path / "marks.json").read_text())]


def reached(marks: list[Mark], target: float) -> Mark | None:
    """Return the first mark at which the loss was as low as `target`."""
    return next((mark for mark in marks if mark.loss <= target), None)


def show(title: str, marks: list[Mark], bare: Mark) -> bool:
    """Print a line of the table; return whether it meets the bars."""
    mark = reached(marks, bare.loss)
    if mark is None:
        print(f"{title:24} has not reached it in {marks[-1].step} steps: {marks[-1].loss:.4f}", flush=True)
        return False
    fewer, less = bare.sent_bytes / mark.sent_bytes, bare.seconds / mark.seconds
    print(
        f"{title:24} {mark.step:6} {mark.loss:8.4f} {mark.sent_bytes / 1e6:12.1f} {mark.seconds:9.1f} "
        f"{fewer:13.1f} {less:11.2f}",
        flush=True,
    )
    return fewer >= FEWER_BYTES and less >= LESS_TIME


def main() -> int:
    """Measure, print the table, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=30, help="of DDP")
    parser.add_argument("--local-steps", type=int, default=12)
    parser.add_argument("--outer", choices=OUTER, default="average")
    parser.add_argument("--codecs", nargs="+", default=["int8"], help="local steps, with each of these")
    asked = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"This needs shaped links: {reason}.")
    figures: dict[str, Any] = {}
    is_met = True
    with tempfile.TemporaryDirectory() as name, hosts(count=asked.hosts, rate=asked.rate) as cluster:
        folder, steps = Path(name), asked.steps
        plain = measure(cluster, None, steps=steps, every=LOOK_STEPS, target=0.0, folder=folder)
        bare = reached(plain, plain[-1].loss)
        assert bare is not None
        print(f"{asked.hosts} hosts, {asked.rate}; the held-out loss of DDP after {bare.step} steps: {bare.loss:.4f}")
        heads = f"{'steps':>6} {'loss':>8} {'MB a worker':>12} {'seconds':>9} {'fewer bytes':>13} {'less time':>11}"
        print(f"{'':24} {heads}")
        show("DDP", plain, bare)
        for codec in asked.codecs:
            sync = Sync(mode="local", local_steps=asked.local_steps, outer=asked.outer, codec=codec)
            most = MOST * steps + 1  # the last step, a boundary, is never reached
            marks = measure(cluster, sync, steps=most, every=sync.local_steps, target=bare.loss, folder=folder)
            is_met &= show(f"local, {sync.local_steps} steps, {codec}", marks, bare)
            figures[codec] = [asdict(mark) for mark in marks]
    print(f"bars: {FEWER_BYTES:g} times fewer bytes, {LESS_TIME:g} times less time: {'met' if is_met else 'NOT met'}")
    print(json.dumps({"ddp": [asdict(mark) for mark in plain], "local": figures}))
    return 0 if is_met else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(Path(sys.argv[2]), **json.loads(sys.argv[3]))
    else:
        sys.exit(main())

"""A worker of `shoal bench engines`: a run on each of the engines that are asked for, in one process, taking turns."""

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.distributed import PrefixStore, Store

from shoal.bench.step_worker import WARM_UP_STEPS, take_turns
from shoal.comm.device import pick_device, set_threads
from shoal.comm.group import barrier, joined
from shoal.comm.rank import ALONE, Rank, read_rank
from shoal.comm.store import connect
from shoal.core.events import EventLog
from shoal.core.files import write_whole
from shoal.core.run_folder import RunFolder
from shoal.parallel.deepspeed.load import load_deepspeed
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.training.jobfile import load_job
from shoal.training.memory import PeakMemory
from shoal.training.run import Run


def measure_sides(
    rank: Rank, file: Path, folder: Path, *, sides: list[str], zero: int, rounds: int, steps: int
) -> None:
    """Time `rounds` rounds of `steps` steps a side; write the seconds of a step in each, and the peak of the memory."""
    # One step more than is done: after the last a run would end, and save.
    job = load_job(file).with_steps(WARM_UP_STEPS + rounds * steps + 1)
    set_threads(rank)
    device = pick_device(rank)
    load_deepspeed(device)  # on both sides, before the memory counts
    store = connect(rank, timeout_s=60)
    with joined(rank, store, device=device, timeout_s=60), contextlib.ExitStack() as opened:
        memory = PeakMemory(device, divided=True)
        running = {}
        for side in sides:
            plan = _plan(side, zero, rank.workers)
            running[side] = _Side(job, plan, folder, rank=rank, store=PrefixStore(side, store), device=device)
            opened.callback(running[side].close)
        turns = {side: each.steps(memory) for side, each in running.items()}
        times = take_turns(turns, rounds=rounds, steps=steps, wait=barrier)
        sharers = max(each.run.sharers for each in running.values())
        found = {"times": times, "peak_bytes": memory.read(sharers=sharers)}
        write_whole(folder / f"worker-{rank.index}.json", json.dumps(found))
        barrier()
        turns.clear()


def _plan(engine: str, zero: int, workers: int) -> Plan:
    # Shares that follow the workers' speed would make the two sides compute different parts.
    return Plan(engine=engine, zero=zero, mesh=Mesh(shard=workers), batch=Batch(live=False))


class _Side:
    """A run on one engine, with all that a run writes."""

    def __init__(self, job: Job, plan: Plan, folder: Path, *, rank: Rank, store: Store, device: torch.device) -> None:
        runs = RunFolder.create(folder, f"{plan.engine}-{rank.index}", stem="bench")
        self._log = EventLog(runs.events_of(rank.index))
        self.run = Run(job, plan, runs, rank=rank, store=store, device=device, log=self._log)

    def steps(self, memory: PeakMemory) -> Iterator[None]:
        """Do one step after the other; the memory of those after the first ones counts."""
        for number, batch in enumerate(self.run.batches(), start=1):
            self.run.step(batch)
            if number == WARM_UP_STEPS:
                memory.restart()
            yield

    def close(self) -> None:
        self.run.close()
        self._log.close()


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    measure_sides(read_rank() or ALONE, Path(asked.pop("file")), Path(asked.pop("folder")), **asked)

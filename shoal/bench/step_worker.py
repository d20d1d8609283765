"""A worker of `shoal bench step`: both sides of the comparison in one process, taking turns."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import Store
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from shoal.comm.device import pick_device, set_threads
from shoal.comm.group import barrier, joined
from shoal.comm.rank import ALONE, Rank, read_rank
from shoal.comm.store import connect
from shoal.core.events import EventLog
from shoal.core.files import write_whole
from shoal.core.run_folder import RunFolder
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan
from shoal.training.batch import to_device
from shoal.training.jobfile import load_job
from shoal.training.run import Run

WARM_UP_STEPS = 5


def main(file: str, folder: str, rounds: str, steps: str) -> None:
    """Time `rounds` rounds of `steps` steps a side; worker 0 writes the seconds of a step in each."""
    rank = read_rank() or ALONE
    total = WARM_UP_STEPS + int(rounds) * int(steps)
    job = load_job(Path(file)).with_steps(total)
    set_threads(rank)
    device = pick_device(rank)
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    with joined(rank, store, device=device, timeout_s=60):
        sides = {"bare": bare_steps(job, rank, device), "shoal": shoal_steps(job, rank, store, device, Path(folder))}
        times = take_turns(sides, rounds=int(rounds), steps=int(steps), wait=barrier if store else lambda: None)
        sides.clear()  # and with them DDP, before the group ends
        if rank.index == 0:
            write_whole(Path(folder) / "times.json", json.dumps(times))


def take_turns(
    sides: dict[str, Iterator[None]], *, rounds: int, steps: int, wait: Callable[[], None]
) -> dict[str, list[float]]:
    """Return, for each side, the seconds of a step in each round."""
    for side in sides.values():
        _advance(side, WARM_UP_STEPS)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            wait()
            started = time.perf_counter()
            _advance(sides[name], steps)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times[name].append((time.perf_counter() - started) / steps)
    return times


def bare_steps(job: Job, rank: Rank, device: torch.device) -> Iterator[None]:
    """Train as people do without shoal: a DataLoader, a loop, and DDP where there are several workers."""
    torch.manual_seed(job.seed)
    model: nn.Module = job.model().to(device)
    optimizer = job.optimizer(list(model.parameters()))
    schedule = job.schedule(optimizer) if job.schedule else None
    replica: nn.Module = DistributedDataParallel(model) if rank.workers > 1 else model
    for batch in (to_device(batch, device) for batch in _bare_batches(job, rank)):
        loss = job.loss(call_model(replica, job, batch), batch)
        optimizer.zero_grad()
        loss.backward()
        if job.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        yield


def _bare_batches(job: Job, rank: Rank) -> Iterator[Any]:
    sampler: DistributedSampler[Any] = DistributedSampler(job.data, num_replicas=rank.workers, rank=rank.index)
    # Batches of one size: the few samples that are left over at the end of an epoch would blur the comparison.
    loader = DataLoader(
        job.data, batch_size=job.batch_size // rank.workers, sampler=sampler, collate_fn=job.collate, drop_last=True
    )
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def shoal_steps(job: Job, rank: Rank, store: Store | None, device: torch.device, folder: Path) -> Iterator[None]:
    """Train through shoal, with all that a run writes."""
    plan = Plan(mesh=Mesh(replicate=rank.workers))
    runs = RunFolder.create(folder, f"run-{rank.index}", stem="bench")
    run = Run(job, plan, runs, rank=rank, store=store, device=device, log=EventLog(runs.events_of(rank.index)))
    for batch in run.batches():
        run.step(batch)
        yield


def _advance(side: Iterator[None], steps: int) -> None:
    for _ in range(steps):
        next(side)


if __name__ == "__main__":
    main(*sys.argv[1:])

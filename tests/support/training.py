"""The two sides of every exactness test: a plain single-process loop, and shoal's worker recording what it did."""

import dataclasses
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import default_collate

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.data.order import order
from shoal.data.partition import global_batch
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.opening import open_run


@dataclass
class Trace:
    """What a training was: per step the loss, and the samples of the global batch (or of a part of it)."""

    losses: list[float]
    samples: list[list[int]]
    parameters: list[torch.Tensor] = dataclasses.field(default_factory=list)


def reference(job: Job, steps: int) -> Trace:
    """Train `job` the obvious way: one process, the whole batch at once, no shoal but the order of samples."""
    torch.manual_seed(job.seed)
    model = job.model()
    optimizer = job.optimizer(list(model.parameters()))
    schedule = job.schedule(optimizer) if job.schedule else None
    trace = Trace([], [])
    for step in range(steps):
        samples = batch_samples(job, step)
        batch = (job.collate or default_collate)([job.data[i] for i in samples])
        loss = job.loss(call_model(model, job, batch), batch)
        optimizer.zero_grad()
        loss.backward()
        if job.clip_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        if schedule:
            schedule.step()
        trace.losses.append(float(loss.item()))
        trace.samples.append(samples)
    trace.parameters = [parameter.detach() for parameter in model.parameters()]
    return trace


def batch_samples(job: Job, step: int) -> list[int]:
    """Return the samples of global batch `step` (from 0) in their order."""
    where = global_batch(step, num_samples=len(job.data), batch_size=job.batch_size)
    positions = np.arange(where.first, where.last)
    if not job.shuffle:
        return [int(i) for i in positions]
    return [int(i) for i in order(len(job.data), positions, seed=job.seed, epoch=where.epoch)]


def train_part(rank: Rank, *, builder: str, arguments: dict[str, object], plan: Plan, folder: Path) -> Trace:
    """Be one worker of a training of the job that `builder` ("module:function") builds. Runs in the pool."""
    job = build(builder, **arguments)
    run_folder = RunFolder(folder)
    log = EventLog(run_folder.events_of(rank.index))
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    trace = Trace([], [])
    try:
        with open_run(job, run_folder, rank=rank, store=store, log=log) as run:
            for batch in run.batches():
                trace.samples.append(list(run.samples))
                trace.losses.append(run.step(batch))
            trace.parameters = [parameter.detach().clone() for parameter in run.model.parameters()]
    finally:
        log.close()
    return trace


def build(builder: str, **arguments: object) -> Job:
    """Return the job that "module:function" builds."""
    module, _, name = builder.partition(":")
    function: Callable[..., Job] = getattr(importlib.import_module(module), name)
    return function(**arguments)


def bare_folder(path: Path, plan: Plan) -> Path:
    """Make a run folder that has just what a worker reads."""
    folder = RunFolder.create(path, None, stem="run")
    write_toml(folder.plan_toml, plan)
    return folder.path


def largest_difference(losses: list[float], expected: list[float]) -> float:
    """Return the largest relative difference between two lists of losses of one length."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, expected, strict=True))

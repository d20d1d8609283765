"""What a worker trains: its part of the model and its optimizer, as the job builds them and the plan lays them out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shoal.comm.collectives import Waiting
from shoal.comm.mesh import Position
from shoal.comm.shm.group import SharedGroup
from shoal.core.errors import JobError
from shoal.parallel.apply import apply_plan
from shoal.parallel.layout import Layout
from shoal.parallel.optimizer import Slices
from shoal.profile.sample import sample_batch
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.calling import Caller, MicroBatch
from shoal.training.pieces import Piece


@dataclass
class TrainState:
    """Everything that changes during training."""

    layout: Layout
    optimizer: torch.optim.Optimizer
    slices: Slices
    schedule: Any
    """A learning-rate scheduler, or None."""
    step: int = 0
    """How many steps have been done."""


def _sample(job: Job, plan: Plan) -> Any:
    """Return a micro-batch as the model will be called with, to find out on fake tensors where it can be cut."""
    size = plan.at_once(job.largest_batch)
    return sample_batch(job, size), MicroBatch(Piece(None, (), 0.0), 0)


def build_state(
    job: Job,
    plan: Plan,
    *,
    position: Position,
    mesh: DeviceMesh | None,
    device: torch.device,
    waiting: Waiting | None = None,
    shared: SharedGroup | None = None,
) -> TrainState:
    """Build this worker's part of the job's model on `device`, and its optimizer and schedule.

    All workers build from the job's seed. Afterwards those with different samples draw different random numbers, those
    with the same samples the same. (Dropout is exact: see `parallel.dropout`.)
    """
    call = Caller(job, plan, device)
    layout = apply_plan(
        job,
        plan,
        position=position,
        mesh=mesh,
        device=device,
        call=call,
        sample=_sample(job, plan) if plan.mesh.pipeline > 1 else None,
        waiting=waiting,
        shared=shared,
    )
    call.layout = layout
    return state_of_layout(job, layout, position=position)


def state_of_layout(job: Job, layout: Layout, *, position: Position) -> TrainState:
    """Return `layout` with its optimizer and schedule, as the job builds them."""
    if not layout.trained:
        raise JobError("model() has no parameter to train.")
    optimizer = job.optimizer(list(layout.parameters.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"optimizer(parameters) returned a {type(optimizer).__name__}, not a torch.optim.Optimizer.")
    schedule = job.schedule(optimizer) if job.schedule else None
    torch.manual_seed(job.seed + 1 + position.data)
    return TrainState(layout, optimizer, Slices(optimizer), schedule)

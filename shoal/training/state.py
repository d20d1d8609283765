"""What a worker trains: the model and its optimizer, as the job builds them and the plan lays them out."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.core.errors import JobError
from shoal.spec.job import Job


@dataclass
class TrainState:
    """Everything that changes during training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Any
    """A learning-rate scheduler, or None."""
    step: int = 0
    """How many steps have been done."""


def build_state(job: Job, *, device: torch.device, rank: int) -> TrainState:
    """Build the job's model on `device`, and its optimizer and schedule.

    All workers build from the job's seed; afterwards each draws its own random numbers (dropout must differ between
    parts of a batch). What the weights are does not hang on this: worker 0's are broadcast.
    """
    torch.manual_seed(job.seed)
    model = job.model()
    if not isinstance(model, nn.Module):
        raise JobError(f"model() returned a {type(model).__name__}, not an nn.Module.")
    model.to(device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise JobError("model() has no parameter to train.")
    optimizer = job.optimizer(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise JobError(f"optimizer(parameters) returned a {type(optimizer).__name__}, not a torch.optim.Optimizer.")
    schedule = job.schedule(optimizer) if job.schedule else None
    torch.manual_seed(job.seed + 1 + rank)
    return TrainState(model, optimizer, schedule)

"""Which engine runs forward and backward under a plan."""

import torch

from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.clock import StepClock
from shoal.training.meeting import Meeting
from shoal.training.pipelined import Pipelined
from shoal.training.state import TrainState
from shoal.training.step import Engine
from shoal.training.whole import Whole


def build_engine(
    state: TrainState, job: Job, plan: Plan, *, device: torch.device, clock: StepClock, meeting: Meeting
) -> Engine:
    """Return the engine of `plan`: a pipeline's where it has stages."""
    if plan.mesh.pipeline > 1:
        return Pipelined(state.layout, job, plan, device=device, clock=clock)
    return Whole(state.layout, job, plan, device=device, clock=clock, meeting=meeting)

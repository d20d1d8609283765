"""How a pipeline's stages call the model: with a micro-batch, and what is known of its samples."""

from typing import Any

import torch

from shoal.parallel.layout import Layout
from shoal.parallel.precision import precision_context
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.pieces import Piece


class MicroBatch:
    """What of a micro-batch the model is not called with: how its samples are known, and what it weighs."""

    def __init__(self, piece: Piece, step: int) -> None:
        self.piece, self.step = piece, step


class Caller:
    """How the model of a job is called with a micro-batch (batch, MicroBatch), on every stage.

    `layout` is set once there is one: the model is called before, on fake tensors, to find out where it can be cut.
    """

    def __init__(self, job: Job, plan: Plan, device: torch.device) -> None:
        self._job, self._plan, self._device = job, plan, device
        self.layout: Layout | None = None

    def __call__(self, model: Any, micro_batch: tuple[Any, MicroBatch]) -> Any:
        """Return the model's output."""
        batch, about = micro_batch
        if self.layout is not None and self.layout.draws:
            self.layout.dropout.begin(step=about.step, samples=about.piece.samples)
        with precision_context(self._plan.precision, self._device, cache=False):
            return call_model(model, self._job, batch)

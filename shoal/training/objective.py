"""The model and its loss as one module: what backward runs from."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.core.errors import JobError
from shoal.spec.call import call_model
from shoal.spec.job import Job


class Objective(nn.Module):
    """`objective(batch, scale)` returns `scale() * loss`, ready for backward.

    `scale` is asked for after the forward pass, so that finding it out can take as long as that does.

    With several workers, the parameter `carrier` is a zero whose gradient is the scaled loss itself: it is summed over
    micro-batches and workers together with the other gradients, and what comes back is the loss of the global batch.
    Otherwise every step would pay for one more message to know it.
    """

    def __init__(self, model: nn.Module, job: Job, *, workers: int) -> None:
        super().__init__()
        self.model = model
        self._job = job
        like = next(p for p in model.parameters() if p.requires_grad)
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        self.carrier = nn.Parameter(zero) if workers > 1 else None

    def forward(self, batch: Any, scale: Callable[[], float]) -> torch.Tensor:
        """Return the scaled loss of `batch`; for None, a zero that gives every parameter a gradient of zero."""
        if batch is None:
            parameters = [p for p in self.parameters() if p.requires_grad]
            return torch.stack([p.new_zeros(()) * p.sum() for p in parameters]).sum()
        loss = self._job.loss(call_model(self.model, self._job, batch), batch)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise JobError(
                f"loss(output, batch) returned {_described(loss)}, not a scalar tensor: the mean of the batch."
            )
        scaled = loss * scale()
        return scaled if self.carrier is None else scaled + self.carrier * scaled.detach()

    def global_loss(self, losses: list[float]) -> float:
        """Return the loss of the global batch: the carrier's, and without one that of the only worker's pieces."""
        if self.carrier is None or self.carrier.grad is None:
            return sum(losses)
        loss = float(self.carrier.grad.item())
        self.carrier.grad = None
        return loss


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"

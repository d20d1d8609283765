"""The model and its loss as one module: what backward runs from."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from shoal.core.errors import JobError
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.training.pieces import Piece


class Objective(nn.Module):
    """`objective(piece, scale)` returns `scale() * loss`, ready for backward.

    `scale` is asked for after the forward pass, so that finding it out can take as long as that does.

    Under DDP, the parameter `carrier` is a zero whose gradient is the scaled loss itself: it is summed over
    micro-batches and workers together with the other gradients, and what comes back is the loss of the global batch.
    Otherwise every step would pay for one more message to know it.
    """

    def __init__(self, model: nn.Module, job: Job, *, carries_loss: bool, compiles: bool = False) -> None:
        super().__init__()
        self.model = model
        self._job = job
        # Model and loss together, so that what lies between them (the logits) need not be written out.
        self._loss = torch.compile(self._loss_of) if compiles else self._loss_of
        like = next(p for p in model.parameters() if p.requires_grad)
        zero = torch.zeros((), dtype=like.dtype, device=like.device)
        self.carrier = nn.Parameter(zero) if carries_loss else None

    def forward(self, piece: Piece, scale: Callable[[], float]) -> torch.Tensor:
        """Return the scaled loss of `piece`; for a stand-in, a zero that gives every parameter a gradient of zero."""
        if piece.weight:
            scaled = _scaled(checked(self._loss(piece.batch)), scale())
        else:
            scaled = nothing(call_model(self.model, self._job, piece.batch))
        return scaled if self.carrier is None else scaled + self.carrier * scaled.detach()

    def _loss_of(self, batch: Any) -> Any:
        return self._job.loss(call_model(self.model, self._job, batch), batch)

    def take_global_loss(self) -> torch.Tensor | None:
        """Return the loss of the global batch, which the carrier has brought; None where there is no carrier."""
        if self.carrier is None or self.carrier.grad is None:
            return None
        loss, self.carrier.grad = self.carrier.grad.clone(), None
        return loss


def scaled_loss(job: Job, output: Any, piece: Piece, scale: Callable[[], float]) -> torch.Tensor:
    """Return what `piece` adds to the loss of the global batch, from the model's output for it."""
    return _scaled(checked(job.loss(output, piece.batch)), scale()) if piece.weight else nothing(output)


def _scaled(loss: torch.Tensor, scale: float) -> torch.Tensor:
    return loss if scale == 1.0 else loss * scale


def checked(loss: Any) -> torch.Tensor:
    """Return `loss`, which must be a scalar tensor."""
    if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
        raise JobError(f"loss(output, batch) returned {_described(loss)}, not a scalar tensor: the mean of the batch.")
    return loss


def nothing(output: Any) -> torch.Tensor:
    """Return a zero from which backward reaches all that `output` came from.

    By the sum of no elements, and not by a product with 0, which would be NaN where the output is not finite, as a loss
    that the model computes over padding alone.
    """
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    tensors = [tensor for tensor in tensors if tensor.dim()] or tensors
    if not tensors:
        raise JobError("the model's output for a batch has no tensor that a parameter took part in.")
    return torch.stack([tensor.reshape(-1)[:0].sum().float() for tensor in tensors]).sum()


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"

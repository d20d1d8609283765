"""The norm of the whole model's gradient, from what each worker holds of it, and clipping by it.

Every worker sums the squares of its own slices, each divided by the number of workers that hold the same slice; summed
over all workers, that is the squared norm. Example: 4 workers, shard=2, replicate=2. Each slice is held twice and
counts half each time; a bias that is whole on all four counts a quarter each time.
"""

from collections.abc import Mapping

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shoal.comm.mesh import Position


def local_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return this worker's slice of the gradient, as a plain tensor; None if there is no gradient."""
    gradient = parameter.grad
    return gradient._local_tensor if isinstance(gradient, DTensor) else gradient


def count_copies(parameter: torch.Tensor, position: Position) -> int:
    """Return how many workers of one stage hold the same numbers of `parameter` as this one."""
    mesh = position.mesh
    holders = mesh.data * mesh.tensor
    if isinstance(parameter, DTensor):
        for axis, placement in enumerate(parameter.placements):
            if not isinstance(placement, Replicate):
                holders //= parameter.device_mesh.size(axis)
    return holders


def squares(parameters: Mapping[str, nn.Parameter], parts: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Return, for each parameter, the squares of this worker's slice of its gradient, summed, times its part."""
    gradients = {name: local_gradient(parameter) for name, parameter in parameters.items()}
    present = {name: gradient for name, gradient in gradients.items() if gradient is not None and gradient.numel()}
    if not present:
        return {}
    norms = torch._foreach_norm([gradient.detach() for gradient in present.values()])
    return {name: norm.double().square() * parts[name] for name, norm in zip(present, norms, strict=True)}


def clip(parameters: Mapping[str, nn.Parameter], norm: torch.Tensor, clip_norm: float) -> None:
    """Scale all gradients so that the norm of the whole, which is `norm`, becomes at most `clip_norm`.

    By the very rule of torch.nn.utils.clip_grad_norm_.
    """
    factor = (clip_norm / (norm + 1e-6)).clamp(max=1.0)
    gradients = [g for p in parameters.values() if (g := local_gradient(p)) is not None]
    for dtype in {gradient.dtype for gradient in gradients}:
        torch._foreach_mul_([g for g in gradients if g.dtype == dtype], factor.to(dtype))

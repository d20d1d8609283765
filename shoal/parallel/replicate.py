"""Plain data parallelism: a copy of the model on every worker, on torch's DistributedDataParallel."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import PlanError

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def apply_replicate(module: nn.Module, *, hook: Callable[[Any, Any], Any]) -> DistributedDataParallel:
    """Wrap `module` so that every worker has worker 0's weights and buffers, and gradients meet through `hook`.

    Called by every worker. Gradients are views of DDP's buckets: they are not kept twice.
    """
    replica = DistributedDataParallel(module, gradient_as_bucket_view=True)
    replica.register_comm_hook(None, hook)
    return replica


def refuse_batch_norm(model: nn.Module, *, reason: str) -> None:
    """Raise PlanError if a layer of `model` computes statistics over what would be only a part of the batch."""
    layers = [name for name, module in model.named_modules() if isinstance(module, _BATCH_NORMS) and module.training]
    if layers:
        raise PlanError(
            f"{layers[0]!r} is a batch norm: {reason} it would take its statistics from a part of the batch, and train "
            f"another model. Use GroupNorm or LayerNorm, or train with 1 worker and without --micro-batch."
        )

"""Plain data parallelism: a copy of the model on every worker, on torch's DistributedDataParallel."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def apply_replicate(module: nn.Module, *, hook: Callable[[Any, Any], Any]) -> DistributedDataParallel:
    """Wrap `module` so that every worker has worker 0's weights and buffers, and gradients meet through `hook`.

    Called by every worker. Gradients are views of DDP's buckets: they are not kept twice.
    """
    replica = DistributedDataParallel(module, gradient_as_bucket_view=True)
    replica.register_comm_hook(None, hook)
    return replica

"""Plain data parallelism: a copy of the model on every worker, on torch's DistributedDataParallel."""

from collections.abc import Callable
from typing import Any, TypeAlias

from torch import nn
from torch.nn.parallel import DistributedDataParallel

Hook: TypeAlias = Callable[[Any, Any], Any]
"""DDP's communication hook: called with a state and a bucket, it returns the future of the sum."""


def apply_replicate(module: nn.Module, *, hook: Hook, bucket_bytes: int) -> DistributedDataParallel:
    """Wrap `module` so that every worker has worker 0's weights and buffers, and gradients meet through `hook`.

    Called by every worker. Gradients are views of DDP's buckets, of about `bucket_bytes`: they are not kept twice.
    """
    replica = DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=bucket_bytes / 2**20)
    replica.register_comm_hook(None, hook)
    return replica

"""The precision of the forward and backward pass; parameters and optimizer state stay in float32."""

from contextlib import AbstractContextManager, nullcontext

import torch


def precision_context(precision: str, device: torch.device, *, cache: bool = True) -> AbstractContextManager[object]:
    """Return the context to run the forward pass in: none for fp32, autocast for bf16.

    `cache` keeps the weights in bfloat16 from their first use to the forward's end. Where weights are gathered and
    freed (ZeRO) that would keep what is to be freed.
    """
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16, cache_enabled=cache)
    return nullcontext()

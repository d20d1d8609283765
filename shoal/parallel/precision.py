"""The precision of the forward and backward pass; parameters and optimizer state stay in float32."""

from contextlib import AbstractContextManager, nullcontext

import torch


def precision_context(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return the context to run the forward pass in: none for fp32, autocast for bf16."""
    if precision == "bf16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()

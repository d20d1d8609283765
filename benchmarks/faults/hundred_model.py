"""What both sides of hundred.py train: a small classifier with dropout, in float32, on samples from a formula."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_SAMPLES = 6_440  # 101 batches an epoch, of which the last has 40 samples
BATCH = 64
FEATURES, CLASSES, WIDTH = 64, 10, 384
STEP_S = 0.02
"""What a disturbed step sleeps: it is as long as a small step is, then, and leaves the cores to workers that start."""


def build() -> nn.Module:
    """Return the model: 0.2M parameters."""
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(WIDTH, WIDTH),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.Linear(WIDTH, CLASSES),
    )


def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return AdamW. Its eps is far above the rounding of a sum: below it, noise would decide the sign of an update."""
    return torch.optim.AdamW(parameters, lr=3e-4, eps=1e-4)


def loss(output: Tensor, batch: Any) -> Tensor:
    """Return the mean of the cross-entropy."""
    return F.cross_entropy(output, batch["y"])


def sample(number: int) -> dict[str, Any]:
    """Return a sample: noise, of which the class is a function; and its number."""
    x = np.random.default_rng(number).standard_normal(FEATURES).astype(np.float32)
    return {"number": np.int64(number), "x": x, "y": np.int64(int(abs(x[:8]).sum() * 10) % CLASSES)}

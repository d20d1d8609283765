"""A worker that takes four times as long for a sample as the other."""

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

SAMPLE_S = 0.001 * (4 if os.environ.get("RANK") == "1" else 1)

x = torch.randn(512, 8, generator=torch.Generator().manual_seed(7))


def inputs(batch: tuple[Tensor, Tensor]) -> Tensor:
    time.sleep(SAMPLE_S * len(batch[0]))
    return batch[0]


job = shoal.Job(
    model=lambda: nn.Linear(8, 1),
    inputs=inputs,
    loss=lambda output, batch: F.mse_loss(output[:, 0], batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    data=torch.utils.data.TensorDataset(x, x.sum(1)),
    batch_size=32,
    steps=50,
)

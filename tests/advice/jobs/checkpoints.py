"""Steps of 150 ms and a small state."""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

STEP_S = 0.15

x = torch.randn(512, 64, generator=torch.Generator().manual_seed(7))


def inputs(batch: tuple[Tensor, Tensor]) -> Tensor:
    time.sleep(STEP_S)
    return batch[0]


job = shoal.Job(
    model=lambda: nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)),
    inputs=inputs,
    loss=lambda output, batch: F.mse_loss(output[:, 0], batch[1]),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    data=torch.utils.data.TensorDataset(x, x.sum(1)),
    batch_size=8,
    steps=22,
)

"""Two megabytes of gradients a step, and little to compute."""

import torch
import torch.nn.functional as F
from torch import nn

import shoal

WIDTH = 512

x = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(7))

job = shoal.Job(
    model=lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)),
    loss=lambda output, batch: F.mse_loss(output[:, 0], batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    data=torch.utils.data.TensorDataset(x, x.mean(1)),
    batch_size=16,
    steps=14,
)

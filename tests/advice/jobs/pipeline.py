"""Blocks that keep a device for 12 ms with a sample, one for each stage of a pipeline."""

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

SAMPLE_S, BLOCKS, WIDTH = 0.004, 4, 16

x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(7))


class Device(torch.autograd.Function):
    """What a device computes while this process waits for it: forward, and twice as long backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(SAMPLE_S * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(2 * SAMPLE_S * len(gradient))
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(Device.apply(self.linear(x)))  # type: ignore[no-untyped-call]


job = shoal.Job(
    model=lambda: nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1)),
    loss=lambda output, batch: F.mse_loss(output[:, 0], batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    data=torch.utils.data.TensorDataset(x, x.sum(1)),
    batch_size=32,
    steps=12,
)

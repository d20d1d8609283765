"""Samples that take long to get, as from a distant storage: 5 ms each."""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

SAMPLE_S, USE_S = 0.005, 0.02


class Distant(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.x = torch.randn(512, 8, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        time.sleep(SAMPLE_S)
        return self.x[index], self.x[index].sum()


def inputs(batch: tuple[Tensor, Tensor]) -> Tensor:
    time.sleep(USE_S)
    return batch[0]


job = shoal.Job(
    model=lambda: nn.Linear(8, 1),
    inputs=inputs,
    loss=lambda output, batch: F.mse_loss(output[:, 0], batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    data=Distant(),
    batch_size=16,
    steps=100,
)

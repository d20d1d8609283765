"""Many small operations for few samples: what a micro-batch takes hardly depends on how many it has.

Its worker times its steps by what it computes: so they take what they would on a machine that does nothing else. The
planner does the same when it measures the machine (profile/stopwatch.py).
"""

import os
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shoal

TOKENS, WIDTH, BLOCKS = 16, 96, 6

if "RANK" in os.environ:  # a worker, not the launcher, which plans
    vars(time)["perf_counter"] = time.process_time

x = torch.randn(512, TOKENS, WIDTH, generator=torch.Generator().manual_seed(7))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fed: Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return x + fed


job = shoal.Job(
    model=lambda: nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, 1)),
    loss=lambda output, batch: F.mse_loss(output.mean(1)[:, 0], batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-4),
    data=torch.utils.data.TensorDataset(x, x.mean((1, 2))),
    batch_size=32,
    steps=120,
)

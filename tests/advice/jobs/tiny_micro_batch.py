"""A device on which every operation takes 2 ms to start: what a micro-batch takes hardly depends on its samples."""

import os
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shoal

START_S, REST_S, WIDTH = 0.002, 0.02, 16

x = torch.randn(512, WIDTH, generator=torch.Generator().manual_seed(7))


class SlowStart(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            time.sleep(START_S)
        return func(*args, **(kwargs or {}))


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    """Take some time in each step that does not depend on micro-batches."""

    def factor(_: int) -> float:
        time.sleep(REST_S)
        return 1.0

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def model() -> nn.Module:
    if "RANK" in os.environ:  # a worker, not the launcher, which plans
        SlowStart().__enter__()  # type: ignore[no-untyped-call]
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


job = shoal.Job(
    model=model,
    loss=lambda output, batch: F.mse_loss(output[:, 0], batch[1]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
    data=torch.utils.data.TensorDataset(x, x.mean(1)),
    schedule=schedule,
    batch_size=8,
    steps=16,
)

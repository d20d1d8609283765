"""Job files for tests of the command line: a preamble that every one shares, and what is special about it."""

from pathlib import Path

PREAMBLE = """
import os, sys, time
import torch
from torch import nn
import shoal

x = torch.randn(40, 5, generator=torch.Generator().manual_seed(7))
fields = dict(
    model=lambda: nn.Linear(5, 1),
    loss=lambda output, batch: ((output[:, 0] - batch[1]) ** 2).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    data=torch.utils.data.TensorDataset(x, x.sum(1)),
    batch_size=8,
    steps=6,
)
worker = int(os.environ.get("RANK", "-1"))  # -1: the launcher, which reads the job too
"""


def job_file(folder: Path, body: str = "", *, job: str = "job = shoal.Job(**fields)", name: str = "tiny.py") -> Path:
    """Write a job file: the preamble, `body`, which may change `fields`, and `job`."""
    path = folder / name
    path.write_text(PREAMBLE + body + "\n" + job + "\n")
    return path

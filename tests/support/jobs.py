"""The jobs that tests train."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.spec.job import Job
from shoal.training.jobfile import load_job

EXAMPLES = Path(__file__).parents[2] / "examples"
GPT: Any = load_job(EXAMPLES / "gpt.py").model
"""The model of examples/gpt.py, a class."""


def gpt(*, full_size: bool, steps: int) -> Job:
    """examples/gpt.py, or the same with a model small enough for a test suite."""
    job = load_job(EXAMPLES / "gpt.py").with_steps(steps)
    if full_size:
        return job
    gpt_class: Any = job.model
    return dataclasses.replace(job, model=lambda: gpt_class(layers=2, width=96, heads=4))


def digits(*, full_size: bool, steps: int) -> Job:
    """examples/digits.py, which is small as it is."""
    return load_job(EXAMPLES / "digits.py").with_steps(steps)


def linear(*, num_samples: int = 50, batch_size: int = 8, steps: int = 12, **fields: Any) -> Job:
    """A regression on a few numbers."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(num_samples, 5, generator=generator)
    return Job(
        **{
            "model": lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)),
            "loss": lambda output, batch: F.mse_loss(output[:, 0], batch[1]),
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            "data": TensorDataset(x, x.sum(1).sin()),
            "batch_size": batch_size,
            "steps": steps,
            **fields,
        }
    )


IGNORED = -100


class Padder(nn.Module):
    """Embeds tokens and predicts each from itself: enough to have a loss per token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.embed(tokens))  # type: ignore[no-any-return]


def padded(*, steps: int, batch_size: int = 8, only_padding: tuple[int, ...] = ()) -> Job:
    """Sentences of 1 to 9 tokens, padded, with a loss per token: the weight of a part is not its samples.

    The sentences numbered in `only_padding` have no token that counts.
    """
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(1, 10, (30,), generator=generator)
    tokens = torch.randint(0, 11, (30, 9), generator=generator)
    targets = torch.where(torch.arange(9) < lengths[:, None], tokens.flip(1), IGNORED)
    targets[list(only_padding)] = IGNORED
    return Job(
        model=Padder,
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), batch[1].flatten(), ignore_index=IGNORED),
        weight=lambda batch: (batch[1] != IGNORED).sum(),
        unit="tokens",
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        data=TensorDataset(tokens, targets),
        batch_size=batch_size,
        steps=steps,
        shuffle=not only_padding,
    )


def clipped(*, steps: int) -> Job:
    """A regression with a schedule, and a norm so small that every step is clipped."""
    return linear(
        steps=steps,
        clip_norm=0.05,
        schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=4, gamma=0.5),
    )


def batch_norm(*, steps: int) -> Job:
    """A model with a layer that looks at the whole batch."""
    model = lambda: nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))  # noqa: E731
    return linear(steps=steps, model=model)


class Unused(nn.Module):
    """A model that does not use all it has."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(5, 1)
        self.spare = nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)  # type: ignore[no-any-return]


def unused(*, steps: int) -> Job:
    """A job whose model has parameters that take no part in the loss."""
    return linear(steps=steps, model=Unused)

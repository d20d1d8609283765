"""Which width and learning rate are best for the digits: each trial trains for a few epochs, and is given up if the
others were better by then.

shoal sweep examples/sweep.py --trials 20 --maximize --metric accuracy
"""

import dataclasses
from typing import TYPE_CHECKING

import torch
from digits import job as digits_job
from torch import nn

import shoal

if TYPE_CHECKING:
    import optuna


def job(trial: "optuna.Trial") -> shoal.Job:
    width = trial.suggest_categorical("width", [16, 32, 64])
    rate = trial.suggest_float("rate", 1e-4, 1e-1, log=True)

    def network() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1),
            nn.GELU(),
            nn.AvgPool2d(2),
            nn.Flatten(),
            nn.Linear(width * 4 * 4, 10),
        )

    return dataclasses.replace(
        digits_job,
        model=network,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=rate),
        epochs=4,
    )

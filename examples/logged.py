"""A loop of your own, whose numbers go to TensorBoard and to Weights & Biases: python examples/logged.py

Without an account, Weights & Biases keeps them in the run folder, for `wandb sync`. To others as well, or to one alone:

    MLFLOW_TRACKING_URI=http://localhost:5000 python examples/logged.py --log tensorboard,mlflow
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import shoal

x = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))

job = shoal.Job(
    model=lambda: nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)),
    loss=lambda output, batch: F.mse_loss(output[:, 0], batch[1]),
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    data=TensorDataset(x, x.square().mean(1)),
    batch_size=50,
    epochs=2,
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", default="tensorboard,wandb", help="of tensorboard, wandb and mlflow")
    with shoal.start(job, log=parser.parse_args().log) as run:
        for batch in run.batches():
            loss = run.step(batch)
            run.log(decibel=10 * math.log10(loss))

"""A small convolutional network on the handwritten digits that come with scikit-learn: over 97% on the test set.

shoal train examples/digits.py --workers 2
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal

Batch = tuple[Tensor, Tensor]


def network() -> nn.Module:
    # Group norm, not batch norm: its output for a sample does not depend on the other samples. And smooth throughout:
    # where ReLU or max pooling jumps, a rounding error of 1e-7 can become one of 1e-4 within a few steps.
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.GroupNorm(4, 32),
        nn.GELU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.GroupNorm(8, 64),
        nn.GELU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def loss(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits, batch[1])


def accuracy(logits: Tensor, batch: Batch) -> Tensor:
    return (logits.argmax(dim=1) == batch[1]).float().mean()


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the training set and the test set: every fifth image is for testing."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    is_test = torch.arange(len(y)) % 5 == 0
    return TensorDataset(x[~is_test], y[~is_test]), TensorDataset(x[is_test], y[is_test])


train_set, test_set = digits()

job = shoal.Job(
    model=network,
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
    data=train_set,
    eval_data=test_set,
    metrics={"accuracy": accuracy},
    batch_size=64,
    epochs=10,
)

if __name__ == "__main__":
    shoal.train(job)

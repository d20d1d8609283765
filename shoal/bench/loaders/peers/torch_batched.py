"""torch's DataLoader over a dataset that takes all rows of a batch by one index: the fastest that it can be made."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.loaders.peers import torch_loader
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "torch DataLoader, batched index"
PACKAGE, MODULES, INSTALL = torch_loader.PACKAGE, torch_loader.MODULES, torch_loader.INSTALL
KINDS = ("tokens", "rows")
HAS_WORKERS = False
write = torch_loader.write


class _Batches:
    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return len(self._sample)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        import torch

        sample, rows = self._sample, np.asarray(indices)
        if sample.kind == "rows":
            return torch.from_numpy(sample.values[rows])
        positions = rows[:, None] * (sample.window - 1) + np.arange(sample.window)
        return torch.from_numpy(sample.values[positions].astype(np.int64))


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch."""
    del folder
    return torch_loader.loader(_Batches(sample), task, shuffle=True, collate_fn=lambda batch: batch)


def how(task: Task) -> str:
    """Return what it uses, in words."""
    del task
    return "__getitems__ with NumPy indexing"

"""torch's DataLoader over a map-style dataset of the samples, which are read from a memory map."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.loaders.peers import crop
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "torch DataLoader"
PACKAGE = "torch"
MODULES = ("torch",)
INSTALL = "pip install torch"
KINDS = ("images", "tokens", "rows")
HAS_WORKERS = True


class Samples:
    """Samples as arrays, one by one."""

    def __init__(self, data: Any, task: Task) -> None:
        self._data, self._task = data, task

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        return as_tensor(self._data[index], self._task)


def as_tensor(value: Any, task: Task) -> Any:
    """Return a sample as a tensor."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(crop.make(value, task)))


def loader(dataset: Any, task: Task, **options: Any) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch of a DataLoader over `dataset`, whose workers stay from epoch to epoch."""
    from torch.utils.data import DataLoader

    workers: dict[str, Any] = {"num_workers": task.workers}
    if task.workers:
        workers |= {"persistent_workers": True, "multiprocessing_context": "fork"}
    options = {"batch_size": task.batch_size, "drop_last": True, **workers, **options}
    made: DataLoader[Any] = DataLoader(dataset, **options)
    return lambda: made


def write(sample: Sample, folder: Path, task: Task) -> int:
    """Write nothing: the samples lie as they are."""
    del folder, task
    return len(sample)


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch."""
    del folder
    return loader(Samples(sample, task), task, shuffle=True)


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return crop.how(task)

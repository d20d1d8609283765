"""Grain over the samples in a memory map, with its reading threads."""

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.bench.loaders.peers import crop, torch_loader
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "Grain"
PACKAGE = "grain"
MODULES = ("grain", "torch")
INSTALL = "pip install grain"
KINDS = ("images", "tokens", "rows")
HAS_WORKERS = False
write = torch_loader.write


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch."""
    del folder
    grain: Any = import_module("grain")
    made = grain.MapDataset.source(sample).shuffle(seed=0).map(lambda value: crop.make(value, task))
    # Batches are made before threads read ahead: handing over each sample by itself costs more than a row does.
    made = made.batch(task.batch_size, drop_remainder=True)
    epoch: Iterable[Any] = made.to_iter_dataset(
        grain.ReadOptions(num_threads=task.threads, prefetch_buffer_size=2 * task.threads)
    )
    return lambda: epoch


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return f"{task.threads} threads" + (f"; {crop.how(task)}" if crop.how(task) else "")

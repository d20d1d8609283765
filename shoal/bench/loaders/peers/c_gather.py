"""Not a loader: shoal's gather in C alone, from one array, with indices that are there already. The limit."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from shoal.bench.loaders.peers import torch_loader
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "gather in C alone"
PACKAGE = "shoal"
MODULES = ("torch", "shoal.native.gather")
INSTALL = "pip install shoal"
KINDS = ("tokens", "rows")
HAS_WORKERS = False
write = torch_loader.write
_CALL_BATCHES = 16


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch: 16 batches a call into one buffer that is used again and again."""
    del folder
    import numpy as np

    from shoal.native.gather import Parts, gather_parts, gather_windows

    at_once = task.batch_size * max(1, min(_CALL_BATCHES, len(sample) // task.batch_size))
    source = Parts([sample.values])
    order = np.random.default_rng(0).permutation(len(sample)).astype(np.int64)
    if task.kind == "tokens":
        order *= task.window - 1
        out = np.zeros((at_once, task.window), np.int64)
    else:
        out = np.zeros((at_once, *sample.values.shape[1:]), sample.values.dtype)
    gather = gather_windows if task.kind == "tokens" else gather_parts

    def epoch() -> Iterator[Any]:
        for begin in range(0, len(order) - at_once + 1, at_once):
            gather(source, None, order[begin : begin + at_once], out, threads=task.threads)
            yield from np.split(out, range(task.batch_size, at_once, task.batch_size))

    return epoch


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return f"{task.threads} threads; no order, no tensors: not a loader"

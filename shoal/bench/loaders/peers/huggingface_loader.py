"""A Hugging Face dataset on disk; torch's DataLoader asks it for all rows of a batch at once."""

import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.loaders.peers import crop, torch_loader
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "Hugging Face datasets"
PACKAGE = "datasets"
MODULES = ("datasets", "torch")
INSTALL = "pip install datasets"
KINDS = ("images", "tokens", "rows")
HAS_WORKERS = True
_WRITE_ROWS = 10_000


def write(sample: Sample, folder: Path, task: Task) -> int:
    """Write the dataset as it saves itself; return how many samples it has."""
    import datasets

    if sample.kind == "tokens" or sample.values.ndim == 2:
        made = _of_lists(sample)
        made.save_to_disk(str(folder / "saved"))
        return len(made)
    features = datasets.Features({"x": _feature(sample)})

    def rows() -> Iterator[dict[str, Any]]:
        for value in sample.first(task.write_s):
            yield {"x": value}

    made = datasets.Dataset.from_generator(
        rows, features=features, cache_dir=str(folder / "cache"), writer_batch_size=_WRITE_ROWS
    )
    made.save_to_disk(str(folder / "saved"))
    shutil.rmtree(folder / "cache")  # it holds the same once more
    return len(made)


def _of_lists(sample: Sample) -> Any:
    """Return a dataset of lists of one length, made from Arrow's own arrays: row by row it would take minutes."""
    import datasets
    import pyarrow as pa

    values = sample.values
    if sample.kind == "tokens":
        values = np.lib.stride_tricks.sliding_window_view(values, sample.window)[:: sample.window - 1]
    pieces = []
    for begin in range(0, len(values), _WRITE_ROWS):
        piece = np.ascontiguousarray(values[begin : begin + _WRITE_ROWS])
        pieces.append(pa.FixedSizeListArray.from_arrays(pa.array(piece.reshape(-1)), piece.shape[1]))
    table = pa.table({"x": pa.chunked_array(pieces)})
    return datasets.Dataset(datasets.table.InMemoryTable(table))


def _feature(sample: Sample) -> Any:
    """Return the type of a column that is written value by value."""
    import datasets

    if sample.kind == "images":
        return datasets.Value("binary")
    name, shape = sample.values.dtype.name, sample.values.shape[1:]
    return getattr(datasets, f"Array{len(shape)}D")(shape, name) if shape else datasets.Value(name)


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch."""
    del sample
    import datasets
    import torch
    from torch.utils.data import BatchSampler, RandomSampler

    saved = datasets.load_from_disk(str(folder / "saved"))
    if task.kind == "images":
        saved.set_transform(lambda rows: {"x": [torch_loader.as_tensor(value, task) for value in rows["x"]]})
    else:
        saved = saved.with_format("numpy")

    def collate(batch: Any) -> Any:
        if task.kind == "images":
            return torch.stack(batch["x"])
        values = batch["x"].astype(np.int64) if task.kind == "tokens" else batch["x"]
        return torch.from_numpy(np.array(values) if not values.flags.writeable else values)

    order = BatchSampler(RandomSampler(saved), task.batch_size, drop_last=True)
    return torch_loader.loader(saved, task, sampler=order, batch_size=None, drop_last=False, collate_fn=collate)


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return crop.how(task)

"""FFCV: one file, its own threads and compiled pipeline. It encodes images anew, and resizes by the mean of an area."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.loaders.peers import crop
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "FFCV"
PACKAGE = "ffcv"
MODULES = ("ffcv", "torch")
INSTALL = "apt install libturbojpeg0-dev libopencv-dev pkg-config, then pip install ffcv"
KINDS = ("images", "tokens", "rows")
HAS_WORKERS = False
_QUALITY = 90


class _Arrays:
    """Samples as FFCV's writer wants them: tuples of arrays."""

    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def __len__(self) -> int:
        return len(self._sample)

    def __getitem__(self, index: int) -> tuple[Any]:
        value = self._sample[index]
        if self._sample.kind == "images":
            return (crop.decode(value),)
        return (value.astype(np.int64) if self._sample.kind == "tokens" else np.asarray(value),)


def write(sample: Sample, folder: Path, task: Task) -> int:
    """Write the file; return how many samples it has."""
    fields: Any = import_module("ffcv.fields")
    if task.kind == "images":
        field = fields.RGBImageField(write_mode="jpg", jpeg_quality=_QUALITY)
    elif task.kind == "tokens":  # as int64, so that loading is a copy
        field = fields.NDArrayField(shape=(task.window,), dtype=np.dtype(np.int64))
    else:
        field = fields.NDArrayField(shape=sample.values.shape[1:], dtype=sample.values.dtype)
    writer = import_module("ffcv.writer").DatasetWriter(
        str(folder / "data.beton"), {"x": field}, num_workers=task.threads
    )
    writer.from_indexed_dataset(_Arrays(sample), chunksize=1000 if task.kind == "rows" else 100)
    return len(sample)


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch."""
    del sample
    decoders, loader, transforms = map(import_module, ("ffcv.fields.decoders", "ffcv.loader", "ffcv.transforms"))
    if task.kind == "images":
        crops = decoders.RandomResizedCropRGBImageDecoder((task.size, task.size))
        steps = [crops, transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    else:
        steps = [decoders.NDArrayDecoder(), transforms.ToTensor()]
    made = loader.Loader(
        str(folder / "data.beton"),
        batch_size=task.batch_size,
        num_workers=task.threads,
        order=loader.OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"x": steps},
    )

    def epoch() -> Iterator[Any]:
        for (batch,) in made:
            yield batch

    return epoch


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return f"encoded anew with quality {_QUALITY}; filter: area, whatever is asked" if task.kind == "images" else ""

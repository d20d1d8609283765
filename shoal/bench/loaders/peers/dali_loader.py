"""DALI's CPU pipeline: files, a decoder that decodes the random crop only, a resize with either filter."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "DALI (CPU)"
PACKAGE = "nvidia-dali-cuda130"
MODULES = ("nvidia.dali", "torch")
INSTALL = "pip install nvidia-dali-cuda130"
KINDS = ("images",)
HAS_WORKERS = False
_SHUFFLED = 1000


def write(sample: Sample, folder: Path, task: Task) -> int:
    """Write a file an image; return how many there are."""
    names = []
    for number, data in enumerate(sample.first(task.write_s)):
        names.append(f"{number}.jpg")
        (folder / names[-1]).write_bytes(data)
    (folder / "list").write_text("".join(f"{name} 0\n" for name in names))
    return len(names)


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch: here, what goes on for ever."""
    del sample
    import numpy as np
    import torch

    dali, fn, types = map(import_module, ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types"))

    def crops() -> Any:
        data, _ = fn.readers.file(
            file_root=str(folder), file_list=str(folder / "list"), random_shuffle=True, initial_fill=_SHUFFLED
        )
        images = fn.decoders.image_random_crop(
            data, device="cpu", random_area=[0.08, 1.0], random_aspect_ratio=[3 / 4, 4 / 3]
        )
        images = fn.resize(
            images,
            size=[task.size, task.size],
            interp_type=types.DALIInterpType.INTERP_LINEAR,
            antialias=task.antialias,
        )
        return fn.flip(images, horizontal=fn.random.coin_flip())

    options = {"batch_size": task.batch_size, "num_threads": task.threads, "device_id": None}
    pipeline = dali.pipeline_def(**options)(crops)()
    pipeline.build()

    def epoch() -> Iterator[Any]:
        while True:
            (batch,) = pipeline.run()
            yield torch.from_numpy(np.asarray(batch.as_tensor()))  # a view: good until the next run

    return epoch


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return f"{task.threads} threads, shuffled among {_SHUFFLED:,}; {task.filter}"

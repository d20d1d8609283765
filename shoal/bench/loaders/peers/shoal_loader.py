"""shoal itself: a pack of the same samples, and shoal.Loader."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "shoal"
PACKAGE = "shoal"
MODULES = ("torch", "shoal.data.loader")
WRITE_MODULES = ("shoal.data.pack.writer", "shoal.data.sources.find")
INSTALL = "pip install shoal"
KINDS = ("images", "tokens", "rows")
HAS_WORKERS = False
_EPOCHS = 1_000_000


class Named:
    """The samples as mappings, which is what a pack is made of."""

    def __init__(self, sample: Sample, column: str) -> None:
        self._sample, self._column = sample, column

    def __len__(self) -> int:
        return len(self._sample)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {self._column: self._sample[index]}


def write(sample: Sample, folder: Path, task: Task) -> int:
    """Write a pack; return how many samples it has. Like the peers, it does not wait for the disk."""
    from shoal.data.pack.progress import Quiet
    from shoal.data.pack.writer import pack

    options: dict[str, Any] = {"sync": False, "report": Quiet(), "workers": task.threads}
    options["compression"] = {task.column: task.compression}
    if task.kind == "images":
        pack(Named(sample, task.column), folder / "data.pack", columns={task.column: "image"}, **options)
    elif task.kind == "tokens":
        dtype = sample.values.dtype.name
        pack(
            sample.folder / "tokens.bin",
            folder / "data.pack",
            kind="tokens",
            dtype=dtype,
            column=task.column,
            **options,
        )
    else:
        pack(sample.folder / "rows.npy", folder / "data.pack", column=task.column, **options)
    return len(sample)


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins epochs without end."""
    del sample
    from shoal.data.loader import Loader
    from shoal.data.loading.crops import ImageOptions

    more: dict[str, Any] = {}
    if task.kind == "images":
        more["image"] = ImageOptions(size=task.size, antialias=task.antialias)
    elif task.kind == "tokens":
        more["window"] = task.window
    made = Loader(
        folder / "data.pack",
        batch_size=task.batch_size,
        epochs=_EPOCHS,
        threads=task.threads,
        drop_last=True,
        **more,
    )

    def epoch() -> Iterator[Any]:
        for batch in made:
            yield batch[task.column]

    return epoch


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return f"{task.threads} threads" + (f"; {task.filter}" if task.kind == "images" else "")

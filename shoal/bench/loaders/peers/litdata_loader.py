"""LitData: its binary chunks on the local disk, read by its own loader."""

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.bench.loaders.peers import crop, torch_loader
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "LitData"
PACKAGE = "litdata"
MODULES = ("litdata", "torch")
INSTALL = "pip install litdata"
KINDS = ("images", "tokens", "rows")
HAS_WORKERS = True
_CHUNK = "64MB"
_PIECE_TOKENS = 1_000_000


def write(sample: Sample, folder: Path, task: Task) -> int:
    """Write chunks; return how many samples they have."""
    import torch

    litdata: Any = import_module("litdata")
    counted = folder / "count"

    def samples(_: int) -> Iterator[Any]:
        count = 0
        if task.kind == "tokens":  # its own way of keeping them: a stream, cut into windows when it is read
            values = sample.values[: len(sample) * task.window]
            for begin in range(0, len(values), _PIECE_TOKENS):
                yield torch.from_numpy(values[begin : begin + _PIECE_TOKENS].astype("int32"))
            count = len(values) // task.window
        else:
            for value in sample.first(task.write_s):
                count += 1
                yield value if isinstance(value, bytes) else torch.from_numpy(value.copy())
        counted.write_text(str(count))

    options: dict[str, Any] = {"chunk_bytes": _CHUNK}
    if task.kind == "tokens":
        options = {"chunk_size": task.window * 4096, "item_loader": litdata.TokensLoader(block_size=task.window)}
    litdata.optimize(
        fn=samples, inputs=[0], output_dir=str(folder / "data"), num_workers=1, start_method="fork", **options
    )
    return int(counted.read_text())


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch."""
    del sample
    import torch

    litdata: Any = import_module("litdata")

    def collate(values: list[Any]) -> Any:
        if task.kind == "images":
            return torch.stack([torch_loader.as_tensor(value, task) for value in values])
        stacked = torch.stack(values)
        return stacked.to(torch.int64) if task.kind == "tokens" else stacked

    options = {"item_loader": litdata.TokensLoader(block_size=task.window)} if task.kind == "tokens" else {}
    dataset = litdata.StreamingDataset(str(folder / "data"), shuffle=True, drop_last=True, **options)
    workers = {"num_workers": task.workers, **({"persistent_workers": True} if task.workers else {})}
    made: Iterable[Any] = litdata.StreamingDataLoader(
        dataset, batch_size=task.batch_size, drop_last=True, collate_fn=collate, **workers
    )
    return lambda: made


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return crop.how(task)

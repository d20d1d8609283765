"""MosaicML Streaming: MDS shards on the local disk, read by torch's DataLoader."""

from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.bench.loaders.peers import crop, torch_loader
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "MosaicML Streaming"
PACKAGE = "mosaicml-streaming"
MODULES = ("streaming", "torch")
INSTALL = "pip install mosaicml-streaming"
KINDS = ("images", "tokens", "rows")
HAS_WORKERS = True
_shared: list[int] = []


def write(sample: Sample, folder: Path, task: Task) -> int:
    """Write shards; return how many samples they have."""
    streaming: Any = import_module("streaming")
    encoding = "bytes"
    if task.kind != "images":
        shape = (task.window,) if task.kind == "tokens" else sample.values.shape[1:]
        encoding = ":".join(filter(None, ["ndarray", sample.values.dtype.name, ",".join(map(str, shape))]))
    count = 0
    with streaming.MDSWriter(out=str(folder / "mds"), columns={"x": encoding}) as writer:
        for value in sample.first(task.write_s):
            writer.write({"x": value if isinstance(value, bytes) else value[...]})
            count += 1
    return count


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch."""
    del sample
    import torch

    streaming: Any = import_module("streaming")

    def collate(rows: list[Any]) -> Any:
        return torch.stack([torch_loader.as_tensor(row["x"], task) for row in rows])

    dataset = streaming.StreamingDataset(local=str(folder / "mds"), shuffle=True, batch_size=task.batch_size)
    _shared.append(dataset._shm_prefix_int)  # the only name of what it shares
    return torch_loader.loader(dataset, task, collate_fn=collate)


def close() -> None:
    """Give back the shared memory, which would outlive this process."""
    for number in _shared:
        for path in Path("/dev/shm").glob(f"{number:06}_*"):  # noqa: S108
            path.unlink(missing_ok=True)


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return crop.how(task)

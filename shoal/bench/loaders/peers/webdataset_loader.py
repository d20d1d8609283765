"""WebDataset: tar files read from begin to end, shuffled in a buffer, so not globally."""

import io
import tarfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.loaders.peers import crop, torch_loader
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "WebDataset"
PACKAGE = "webdataset"
MODULES = ("webdataset", "torch")
INSTALL = "pip install webdataset"
KINDS = ("images", "tokens", "rows")
HAS_WORKERS = True
_SHARDS = 8
_BUFFER = 1000


def write(sample: Sample, folder: Path, task: Task) -> int:
    """Write tar files; return how many samples they have."""
    count = 0
    with ExitStack() as stack:
        files = [stack.enter_context(tarfile.open(folder / f"{number}.tar", "w")) for number in range(_SHARDS)]
        for value in sample.first(task.write_s):
            data = value if isinstance(value, bytes) else value.tobytes()
            member = tarfile.TarInfo(f"{count:09d}.x")
            member.size = len(data)
            files[count % _SHARDS].addfile(member, io.BytesIO(data))
            count += 1
    return count


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch."""
    import torch

    webdataset: Any = import_module("webdataset")
    dtype, shape = sample.values.dtype, sample.values.shape[1:]

    def read(entry: dict[str, Any]) -> Any:
        value = entry["x"]
        if task.kind == "tokens":
            value = np.frombuffer(value, dtype)
        elif task.kind == "rows":
            value = np.frombuffer(value, dtype).reshape(shape).copy()
        return torch_loader.as_tensor(value, task)

    files = sorted(str(path) for path in folder.glob("*.tar"))
    stream = webdataset.WebDataset(files, shardshuffle=_SHARDS, empty_check=False).shuffle(_BUFFER).map(read)
    stream = stream.batched(task.batch_size, collation_fn=torch.stack, partial=False)
    return torch_loader.loader(stream, task, batch_size=None, drop_last=False)


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return "; ".join(filter(None, [f"shuffled among {_BUFFER:,}", crop.how(task)]))

"""An LMDB database, read by torch's DataLoader."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from shoal.bench.loaders.peers import crop, torch_loader
from shoal.bench.loaders.peers.sample import Sample
from shoal.bench.loaders.peers.task import Task

NAME = "LMDB"
PACKAGE = "lmdb"
MODULES = ("lmdb", "torch")
INSTALL = "pip install lmdb"
KINDS = ("images", "tokens", "rows")
HAS_WORKERS = True
_MAP_BYTES = 1 << 40
_TRANSACTION = 10_000


class _Values:
    """The values of the database; each process opens it for itself."""

    def __init__(self, folder: Path, sample: Sample) -> None:
        self._folder, self._kind = folder, sample.kind
        self._dtype, self._shape = sample.values.dtype, sample.values.shape[1:]
        self._count = int((folder / "count").read_text())
        self._transaction: Any = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if self._transaction is None:
            import lmdb

            database = lmdb.open(str(self._folder / "db"), readonly=True, lock=False, readahead=False)
            self._transaction = database.begin(buffers=True)
        value = self._transaction.get(_key(index))
        if self._kind == "images":
            return bytes(value)
        array = np.frombuffer(value, self._dtype)
        return array if self._kind == "tokens" else array.reshape(self._shape).copy()


def _key(index: int) -> bytes:
    return index.to_bytes(8, "big")


def write(sample: Sample, folder: Path, task: Task) -> int:
    """Write the database; return how many samples it has."""
    import lmdb

    database = lmdb.open(str(folder / "db"), map_size=_MAP_BYTES, sync=False, writemap=False)
    transaction, count = database.begin(write=True), 0
    for value in sample.first(task.write_s):
        transaction.put(_key(count), value if isinstance(value, bytes) else value.tobytes(), append=True)
        count += 1
        if count % _TRANSACTION == 0:
            transaction.commit()
            transaction = database.begin(write=True)
    transaction.commit()
    database.close()
    (folder / "count").write_text(str(count))
    return count


def open_batches(folder: Path, task: Task, sample: Sample) -> Callable[[], Iterable[Any]]:
    """Return what begins an epoch."""
    return torch_loader.loader(torch_loader.Samples(_Values(folder, sample), task), task, shuffle=True)


def how(task: Task) -> str:
    """Return what it uses, in words."""
    return crop.how(task)

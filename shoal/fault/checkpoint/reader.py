"""Reading a checkpoint: by any number of workers, each of them only what it needs.

1. `choose` goes through the checkpoints that are there, the latest first; the workers share the files of one among them
   and check their checksums. The first without damage is taken by all.
2. A worker reads the slices that overlap with its own, file by file (fault/shards.py).
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Store

from shoal.comm.told import told
from shoal.core.errors import CheckpointError, ShoalError
from shoal.fault.checkpoint.file_format import DTYPES, Entry, read_tensor
from shoal.fault.checkpoint.manifest import COMMON, committed, find_damage, read_manifest, step_of
from shoal.fault.shards import Found


@dataclass(frozen=True)
class _FileSlice:
    """A slice that lies in a file."""

    path: Path
    entry: Entry
    offset: tuple[int, ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return self.entry.shape

    def read(self) -> Tensor:
        try:
            return read_tensor(self.path, self.entry)
        except OSError as error:
            meanwhile = " It was removed meanwhile." if isinstance(error, FileNotFoundError) else ""
            raise CheckpointError(f"{self.path} cannot be read: {error.strerror or error}.{meanwhile}") from None


class Checkpoint:
    """A checkpoint that is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_manifest(path)
        self.step: int = self._manifest["step"]
        self.workers: int = self._manifest["workers"]
        self.files: dict[str, dict[str, Any]] = self._manifest["files"]
        self.found = {name: self._found(name, fields) for name, fields in self._manifest["tensors"].items()}
        """Every tensor in it, by name."""

    def alike(self) -> dict[str, Any]:
        """Return what all workers had alike."""
        return self._json(COMMON)

    def own(self, worker: int) -> dict[str, Any]:
        """Return what `worker` had for itself."""
        return self._json(f"worker-{worker}.json")

    def damage(self, *, index: int = 0, count: int = 1) -> str:
        """Return what is wrong with the files that worker `index` of `count` checks; nothing if all are well."""
        names = sorted(self.files, key=lambda name: -self.files[name]["bytes"])[index::count]
        return find_damage(self.path, {name: self.files[name] for name in names})

    def _json(self, name: str) -> dict[str, Any]:
        try:
            value: dict[str, Any] = json.loads((self.path / name).read_text())
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}.") from None
        return value

    def _found(self, name: str, fields: dict[str, Any]) -> Found:
        dtype = DTYPES[fields["dtype"]]
        slices = []
        for held in fields["slices"]:
            entry = Entry(dtype, tuple(held["shape"]), held["begin"], held["end"])
            if entry.end - entry.begin != math.prod(entry.shape) * dtype.itemsize or held["file"] not in self.files:
                raise CheckpointError(f"the manifest of {self.path} contradicts itself at {name}.")
            slices.append(_FileSlice(self.path / held["file"], entry, tuple(held["offset"])))
        return Found(dtype, tuple(fields["shape"]), slices)


def choose(
    checkpoints: Path,
    *,
    index: int,
    count: int,
    store: Store | None,
    timeout_s: float,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
) -> Checkpoint | None:
    """Return the latest checkpoint without damage; None if there is none at all. Called by every worker.

    `say` is told of those that are passed over. If all are damaged, that is an error. `check` is called while this
    waits for the others: it raises if one is lost.
    """
    steps = agreed_steps(checkpoints, index=index, store=store, timeout_s=timeout_s, check=check)
    damages = []
    for step in reversed(steps):
        checkpoint, damage = opened(checkpoints / f"step-{step:08d}", index=index, count=count)
        all_damage = [damage]
        if store is not None:
            store.set(f"damage/{step}/{index}", damage)
            keys = [f"damage/{step}/{number}" for number in range(count)]
            all_damage = told(store, keys, timeout_s=timeout_s, check=check)
        found = [each for each in all_damage if each]
        if not found:
            return checkpoint
        damages.append(found[0])
        say(f"The checkpoint of step {step} is not used: {found[0]}")
    if damages:
        raise CheckpointError(f"no checkpoint in {checkpoints} can be read. {damages[0]}")
    return None


def opened(path: Path, *, index: int = 0, count: int = 1) -> tuple[Checkpoint | None, str]:
    """Return the checkpoint in `path`, and what is wrong with the files that worker `index` of `count` checks."""
    try:
        checkpoint = Checkpoint(path)
    except (ShoalError, KeyError, TypeError, ValueError) as error:
        return None, str(error)
    return checkpoint, checkpoint.damage(index=index, count=count)


def agreed_steps(
    checkpoints: Path, *, index: int, store: Store | None, timeout_s: float, check: Callable[[], None] = lambda: None
) -> list[int]:
    """Return the steps of the checkpoints that are there, the oldest first, as worker 0 sees it. By every worker."""
    there = [step_of(path) for path in committed(checkpoints)] if index == 0 else []
    if store is None:
        return there
    if index == 0:
        store.set("there", json.dumps(there))
    steps: list[int] = json.loads(told(store, ["there"], timeout_s=timeout_s, check=check)[0])
    return steps


def read_whole(found: Found) -> Tensor:
    """Return all of a tensor."""
    whole = torch.empty(found.shape, dtype=found.dtype)
    for held in found.slices:
        place = whole
        for dim, (offset, length) in enumerate(zip(held.offset, held.sizes, strict=True)):
            place = place.narrow(dim, offset, length)
        place.copy_(held.read())
    return whole

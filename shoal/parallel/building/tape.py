"""Operations written down while a model is built, and run again for the numbers of one tensor.

1. A large tensor made during a build is a shape without numbers. The operation that makes it, or writes to it, is put
   down as a Note; a random one with the state of its generator.
2. For each tensor that a note takes it holds a Ref: where the tensor lies in its storage, and which note wrote to that
   storage last. So views need no notes, writes through views are as good as any, and notes that no living tensor rests
   on go away with the tensors.
3. `replay` runs the notes that one tensor rests on, in their order, each random one from its own state, and lets go of
   every storage after its last use. A note that writes the whole of a storage needs nothing older.

Example. `nn.Linear(1000, 1000)`, then `normal_(weight, std=0.02)`, leaves for the weight of 4,000,000 bytes:
    note 1   empty(1000, 1000)          makes the storage
    note 2   uniform_ from state A      writes all of it
    note 3   normal_  from state B      writes all of it
Its numbers take note 3 alone, on 4,000,000 fresh bytes; notes 1 and 2 are already forgotten.
"""

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.profile.torch_private import tree_map_only

CPU = torch.device("cpu")
# The allocator of C keeps freed tensors of up to 32 MB, puts small things among them, and the next one does not fit:
# building 40 x 16 MB, one at a time, left 1,017 MB resident; giving back after this much, 51 (glibc 2.36, 2026-11-15).
DROPPED_BYTES = 32 * 1024**2
Storages = dict["Cell", torch.UntypedStorage]


@dataclasses.dataclass(eq=False)
class Cell:
    """A storage that is not there: its length, and the note that wrote to it last."""

    num_bytes: int
    writer: "Note"


@dataclasses.dataclass(frozen=True, eq=False)
class Ref:
    """A tensor that is not there: where it lies in its storage, and the last note that counts for it."""

    cell: Cell
    writer: "Note"
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    def on(self, storages: Storages) -> Tensor:
        """Return this tensor on the storage that stands for its cell; on a new, unwritten one if none does yet."""
        if self.cell not in storages:
            storages[self.cell] = torch.empty(self.cell.num_bytes, dtype=torch.uint8, device=CPU).untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=CPU)
        return empty.set_(storages[self.cell], self.offset, self.size, self.stride)


@dataclasses.dataclass(eq=False)
class Note:
    """One operation: what it takes (a Ref for each tensor that is not there), what it needs done before, what it makes.

    `random_state` is None for an operation that draws nothing; a generator among the arguments is taken in that state.
    `makes` has a place for each tensor that the operation returns, None for one that was there before.
    """

    number: int
    func: Any
    args: Any
    kwargs: Any
    random_state: Tensor | None
    default_dtype: torch.dtype
    needs: list["Note"] = dataclasses.field(default_factory=list)
    makes: list[Ref | None] = dataclasses.field(default_factory=list)

    def cells(self) -> set[Cell]:
        """Return the storages that the operation touches."""
        return {ref.cell for ref in [*leaves(Ref, (self.args, self.kwargs)), *self.makes] if ref is not None}

    def run(self, storages: Storages) -> None:
        """Do the operation on `storages`. The global generator and the default dtype are then anywhere."""
        args, kwargs = tree_map_only(Ref, lambda ref: ref.on(storages), (self.args, self.kwargs))
        if self.random_state is not None:
            torch.set_rng_state(self.random_state)
            own = torch.Generator()
            own.set_state(self.random_state)
            args, kwargs = tree_map_only(torch.Generator, lambda _: own, (args, kwargs))
        torch.set_default_dtype(self.default_dtype)
        results = leaves(Tensor, self.func(*args, **kwargs))
        for ref, result in zip(self.makes, results, strict=True):
            if ref is not None:
                storages[ref.cell] = _laid_out(result, ref).untyped_storage()


def leaves(kind: type, tree: Any) -> list[Any]:
    """Return what is of `kind` in nested tuples, lists and dicts, in order."""
    found: list[Any] = []
    tree_map_only(kind, found.append, tree)
    return found


def _laid_out(result: Tensor, ref: Ref) -> Tensor:
    """Return `result` in the layout of `ref`: a kernel may not lay out its result as the rule for its shape says."""
    if (result.stride(), result.storage_offset()) == (ref.stride, ref.offset):
        return result
    return ref.on({}).copy_(result)


def needed(refs: Iterable[Ref]) -> list[Note]:
    """Return the notes that `refs` rest on, in the order in which they were put down."""
    found: set[Note] = set()
    waiting = [ref.writer for ref in refs]
    while waiting:
        note = waiting.pop()
        if note not in found:
            found.add(note)
            waiting += note.needs
    return sorted(found, key=lambda note: note.number)


def replay(wanted: Ref) -> Tensor:
    """Return the numbers of `wanted`, as a view of those of its storage. Leaves no trace in torch's global state."""
    notes = needed([wanted])
    last_use = {cell: note.number for note in notes for cell in note.cells()}
    last_use.pop(wanted.cell, None)
    storages: Storages = {}
    with _undisturbed():
        for note in notes:
            note.run(storages)
            for cell in note.cells():
                count_dropped(cell.num_bytes)
                if last_use.get(cell) == note.number:
                    storages.pop(cell, None)
        return wanted.on(storages)


class _Drop:
    """Gives memory back to the system after every DROPPED_BYTES of tensors that were made and dropped."""

    def __init__(self) -> None:
        self._trim: Any = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it, and the need for it
        self._num_bytes = 0

    def __call__(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        if self._trim is not None and self._num_bytes > DROPPED_BYTES:
            self._num_bytes = 0
            self._trim(0)


count_dropped = _Drop()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Put the global generator and the default dtype back afterwards; inside no gradients and no autocast."""
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.autocast("cpu", enabled=False):
        try:
            yield
        finally:
            torch.set_default_dtype(dtype)

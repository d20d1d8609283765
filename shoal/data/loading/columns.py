"""The columns of a pack as batches: one gather for all samples of a chunk, cut into batches without another copy."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.core.errors import ConfigError
from shoal.data.loading.ring import Gathered
from shoal.data.loading.slot import Slot
from shoal.data.loading.tables import Found, Maps, open_table
from shoal.data.order import Indices
from shoal.data.pack.damaged import is_shape, text_of, wrong_shape
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column, stored_dtype
from shoal.native.gather import gather_bytes, gather_parts
from shoal.native.gather_ring import RingColumn

RAGGED = ("list", "padded", "packed")


@dataclass(frozen=True)
class Request:
    """The samples of some consecutive batches."""

    epoch: int
    seed: int
    samples: Indices
    part: NDArray[np.int32]
    """The part of the pack that each lies in."""
    row: Indices
    """Its row there."""
    sizes: Sequence[int]
    """How many samples each batch has."""


class ColumnLoader(Protocol):
    """What loads one column."""

    sample_bytes: int
    """About how many bytes one sample takes in a batch."""

    def load(self, request: Request, slot: Slot) -> Mapping[str, Sequence[Any]]:
        """Return for each name that the column has in a batch its value in every batch."""


class FixedColumn:
    """Numbers and arrays of one shape: a tensor [samples, *shape] a batch."""

    def __init__(self, pack: Pack, column: Column) -> None:
        self._name, self._shape = column.name, column.shape
        stored = stored_dtype(column.dtype)
        self._stored: torch.dtype = getattr(torch, stored.name)
        self._dtype: torch.dtype = getattr(torch, column.dtype)
        self._table = open_table(pack, column.name, compression=column.compression, is_fixed=True)
        self.sample_bytes = stored.itemsize * int(np.prod(column.shape, dtype=np.int64))

    def load(self, request: Request, slot: Slot) -> Mapping[str, Sequence[Any]]:
        """Gather into the slot."""
        found = self._table.find(request.part, request.row)
        out = slot.tensor(self._name, (len(request.row), *self._shape), self._stored)
        gather_parts(found.values, found.part, found.row, out.numpy())
        if self._dtype != self._stored:
            out = out.view(self._dtype)
        return {self._name: cut_tensor(out, request.sizes)}

    @property
    def is_gathered(self) -> bool:
        """Whether batches are nothing but rows of maps."""
        return isinstance(self._table, Maps)

    def gathered(self) -> Gathered | None:
        """Return what C gathers by itself, once all parts are mapped."""
        parts = self._table.every() if isinstance(self._table, Maps) else None
        if parts is None:
            return None
        return Gathered(self._name, RingColumn(parts), self._shape, self._stored, self._dtype)


class RaggedColumn:
    """Arrays of any length: a list of tensors a batch; padded or packed into one tensor on request."""

    def __init__(self, pack: Pack, column: Column, *, form: str = "list") -> None:
        if form not in RAGGED:
            raise ConfigError(f"ragged={form!r} is none of {', '.join(RAGGED)}.")
        if form != "list" and column.ndim > 1:
            raise ConfigError(f"ragged={form!r} is for one dimension; column {column.name!r} has {column.ndim}.")
        self._path, self._name, self._form = pack.path, column.name, form
        self._dtype: torch.dtype = getattr(torch, column.dtype)
        self._table = open_table(pack, column.name, compression=column.compression)
        self._shapes = None
        if column.ndim > 1:
            self._shapes = open_table(pack, f"{column.name}.shape", compression=column.compression)
        self.sample_bytes = 1024  # nobody knows; a guess on the small side loads more batches at once

    def load(self, request: Request, slot: Slot) -> Mapping[str, Sequence[Any]]:  # noqa: ARG002
        """Gather all rows into one buffer, and cut that."""
        values, offsets = _variable(self._table.find(request.part, request.row))
        tensor = torch.from_numpy(values).view(self._dtype)
        if self._form == "packed":
            return self._packed(tensor, offsets, request.sizes)
        if self._form == "padded":
            return self._padded(tensor, offsets, request.sizes)
        rows: Sequence[torch.Tensor] = cut_tensor(tensor, np.diff(offsets).tolist())
        if self._shapes is not None:
            shapes, bounds = _variable(self._shapes.find(request.part, request.row))
            each = [shapes[a:b].tolist() for a, b in pairwise(bounds.tolist())]
            for row, shape, sample in zip(rows, each, request.samples.tolist(), strict=True):
                if not is_shape(shape, len(row)):
                    raise wrong_shape(shape, len(row), _named(self._path, sample, self._name))
            rows = [row.view(shape) for row, shape in zip(rows, each, strict=True)]
        return {self._name: cut_list(rows, request.sizes)}

    def _packed(self, tensor: torch.Tensor, offsets: Indices, sizes: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        bounds = _bounds(sizes)
        ends = offsets[bounds].tolist()
        return {
            self._name: [tensor[a:b] for a, b in pairwise(ends)],
            f"{self._name}.offsets": [torch.from_numpy(offsets[a : b + 1] - offsets[a]) for a, b in pairwise(bounds)],
        }

    def _padded(self, tensor: torch.Tensor, offsets: Indices, sizes: Sequence[int]) -> Mapping[str, Sequence[Any]]:
        lengths, whole = torch.from_numpy(np.diff(offsets)), []
        for first, last in pairwise(_bounds(sizes)):
            mine = lengths[first:last]
            padded = tensor.new_zeros(last - first, int(mine.max()) if last > first else 0)
            padded[torch.arange(padded.shape[1]) < mine[:, None]] = tensor[int(offsets[first]) : int(offsets[last])]
            whole.append(padded)
        return {self._name: whole, f"{self._name}.length": cut_tensor(lengths, sizes)}


class BytesColumn:
    """Texts and bytes: a list of str or bytes a batch."""

    def __init__(self, pack: Pack, column: Column) -> None:
        self._path, self._name, self._is_text = pack.path, column.name, column.kind == "text"
        self._table = open_table(pack, column.name, compression=column.compression)
        self.sample_bytes = 1024

    def load(self, request: Request, slot: Slot) -> Mapping[str, Sequence[Any]]:  # noqa: ARG002
        """Gather all rows, and make an object of each."""
        values, offsets = _variable(self._table.find(request.part, request.row))
        whole = values.tobytes()
        rows: list[Any] = [whole[a:b] for a, b in pairwise(offsets.tolist())]
        return {self._name: cut_list(self._texts(rows, request) if self._is_text else rows, request.sizes)}

    def _texts(self, rows: list[bytes], request: Request) -> list[str]:
        try:
            return [row.decode() for row in rows]
        except UnicodeDecodeError:
            samples = request.samples.tolist()
            return [text_of(row, _named(self._path, at, self._name)) for row, at in zip(rows, samples, strict=True)]


def _named(path: Path, sample: int, column: str) -> str:
    return f"sample {sample} of {path}, column {column!r}"


def _variable(found: Found) -> tuple[NDArray[Any], Indices]:
    """Return variable rows one after another, and where each begins."""
    assert found.offsets is not None
    return gather_bytes(found.values, found.offsets, found.part, found.row)


def _bounds(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)]


def cut_tensor(tensor: torch.Tensor, sizes: Sequence[int]) -> Sequence[torch.Tensor]:
    """Return the rows of each batch: views."""
    return torch.split_with_sizes(tensor, list(sizes))


def cut_list(rows: Sequence[Any], sizes: Sequence[int]) -> list[list[Any]]:
    """Return the rows of each batch."""
    return [list(rows[first:last]) for first, last in pairwise(_bounds(sizes))]

"""Arrays of equal length: row i of the source is row i of each. HDF5, Zarr and NumPy say only how arrays are opened."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column
from shoal.data.sources.rows import array_column, as_batches, as_samples, chosen, in_memory, row_bytes_of
from shoal.data.sources.source import BATCH_BYTES, Batch, Sample, Slice, Values, cut_rows, one_line
from shoal.data.sources.tree import Tree, described


class StoredArray(Protocol):
    """An array in a file: its rows are read when it is sliced."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows first."""

    @property
    def dtype(self) -> Any:
        """The elements' type."""

    def __getitem__(self, rows: slice, /) -> Any: ...


class ArraySource(ABC):
    """Rows of the arrays in one or more files, file after file."""

    kind: str

    def __init__(self, tree: Tree, names: list[str], *, columns: tuple[str, ...] | list[str] | None = None) -> None:
        self.tree, self.names = tree, tuple(names)
        self._wanted = tuple(columns) if columns else None
        with self._opened(self.names[0]) as arrays:
            self._columns = tuple(self.column(name, array) for name, array in arrays.items())
            self._multiple = _chunk_rows(arrays.values())
        self._row_bytes = row_bytes_of(self._columns)

    @abstractmethod
    def arrays(self, name: str) -> AbstractContextManager[dict[str, StoredArray]]:
        """Open a file of the source and return all arrays in it that have rows."""

    def column(self, name: str, array: StoredArray) -> Column:
        """Return what an array holds."""
        return array_column(name, np.dtype(array.dtype), tuple(array.shape[1:]))

    def values(self, array: StoredArray, rows: slice) -> Values:
        """Return some rows of an array."""
        return in_memory(np.asarray(array[rows]))

    def shown(self, name: str) -> str:
        """Return what a file is called in messages."""
        return name or self.tree.name

    @property
    def columns(self) -> tuple[Column, ...]:
        """What the arrays hold."""
        return self._columns

    def describe(self) -> dict[str, Any]:
        """Return the kind, the files' names and sizes."""
        return described(self.kind, self.tree, self.names, columns=[column.name for column in self._columns])

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return ranges of rows of each file."""
        found = []
        for name in self.names:
            with self._opened(name) as arrays:
                num_rows = self._num_rows(name, arrays)
            found += cut_rows(num_rows, self._row_bytes, about_bytes, items=(name,), multiple=self._multiple)
        return found

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the rows of a range."""
        with self._opened(part.items[0]) as arrays:
            load, label = self._loading(part.items[0], arrays)
            yield from as_samples(part, load, label, self._columns, row_bytes=self._row_bytes, multiple=self._multiple)

    def read_batches(self, part: Slice) -> Iterator[Batch]:
        """Yield the rows of a range, many at a time."""
        with self._opened(part.items[0]) as arrays:
            load, label = self._loading(part.items[0], arrays)
            yield from as_batches(part, load, label, row_bytes=self._row_bytes, multiple=self._multiple)

    def fingerprint(self, part: Slice) -> str:
        """Return size and time of the file."""
        return self.tree.stamp(part.items[0])

    @contextmanager
    def _opened(self, name: str) -> Iterator[dict[str, StoredArray]]:
        """Open a file for its wanted arrays; what the library says of a broken one is passed on with the name."""
        with ExitStack() as stack:
            try:
                arrays = stack.enter_context(self.arrays(name))
            except (ConfigError, DataError):
                raise
            except Exception as error:  # each library raises its own
                raise DataError(f"{self.shown(name)} cannot be opened: {one_line(error)}.") from error
            if not arrays:
                raise ConfigError(f"{self.shown(name)} has no array with rows.")
            yield {column: arrays[column] for column in chosen(arrays, self._wanted, self.shown(name))}

    def _num_rows(self, name: str, arrays: Mapping[str, StoredArray]) -> int:
        lengths = {column: array.shape[0] for column, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            said = ", ".join(f"{column} {length}" for column, length in lengths.items())
            raise ConfigError(f"The arrays of {self.shown(name)} differ in length ({said}): choose with columns=[...].")
        return next(iter(lengths.values()))

    def _loading(self, name: str, arrays: Mapping[str, StoredArray]) -> Any:
        name = self.shown(name)
        for column in self._columns:
            if column.name not in arrays or self.column(column.name, arrays[column.name]) != column:
                raise DataError(f"{name} has no column {column.name!r} like that of {self.names[0]}: {_said(column)}.")

        def load(begin: int, end: int) -> dict[str, Values]:
            rows = f"row {begin}" if end - begin == 1 else f"rows {begin} to {end - 1}"
            loaded = {}
            for column in arrays:
                try:
                    loaded[column] = self.values(arrays[column], slice(begin, end))
                except Exception as error:  # each library raises its own
                    raise DataError(f"{name}: {rows} of {column!r} cannot be read: {one_line(error)}.") from error
            return loaded

        return load, lambda row: f"{name}: row {row}"


def _chunk_rows(arrays: Iterable[StoredArray]) -> int:
    """Return how many rows a piece of the widest array has in the file: none should be decompressed twice."""
    widest = max(arrays, key=lambda array: int(np.prod(array.shape[1:])))
    chunks = getattr(widest, "shards", None) or getattr(widest, "chunks", None)
    return int(chunks[0]) if chunks and chunks[0] * int(np.prod(widest.shape[1:])) < BATCH_BYTES else 1


def _said(column: Column) -> str:
    return f"{column.dtype} {list(column.shape)}" if column.kind in ("scalar", "array") else column.kind

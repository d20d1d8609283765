"""Zarr stores, format 2 and 3: a group's arrays are the columns, or the one array is.

A chunk that is not there reads as the array's fill value, as Zarr defines it: stores leave out such chunks.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.core.errors import DataError
from shoal.data.sources.arrays import ArraySource, StoredArray
from shoal.data.sources.source import Slice, library
from shoal.data.sources.tree import Tree

_METADATA = ("zarr.json", ".zgroup", ".zarray", ".zmetadata")


class ZarrSource(ArraySource):
    """Rows of the arrays of one Zarr store."""

    kind = "zarr"

    def __init__(self, tree: Tree, names: list[str] | None = None, **options: Any) -> None:
        del names  # a store is opened whole
        super().__init__(tree, [""], **options)

    @contextmanager
    def arrays(self, name: str) -> Iterator[dict[str, StoredArray]]:
        """Open the store and return its arrays, also those in groups."""
        zarr = library("zarr", extra="zarr", what="Zarr stores")
        opened = zarr.open(self.tree.path(name), mode="r")
        found = {self.tree.name: opened} if isinstance(opened, zarr.Array) else _arrays(opened)
        yield {path: _Checked(array, self.tree) for path, array in sorted(found.items()) if array.shape}

    def describe(self) -> dict[str, Any]:
        """Return the store's name, its size and its columns."""
        sizes = self.tree.sizes()
        counts = {"num_files": len(sizes), "num_bytes": sum(sizes.values())}
        return {
            "kind": self.kind,
            "name": self.tree.name,
            **counts,
            "columns": [column.name for column in self.columns],
        }

    def fingerprint(self, part: Slice) -> str:
        """Return sizes and times of the chunks of these rows, and of the metadata."""
        with self._opened("") as arrays:
            checked = [array for array in arrays.values() if isinstance(array, _Checked)]
            files = [file for array in checked for file in array.files(part.begin, part.end)]
            files += [f"{array.path}/{name}" for array in checked for name in _METADATA]
        stamps = {file: self.tree.stamp(file) for file in [*_METADATA, *files]}
        return ";".join(f"{file}={stamp}" for file, stamp in stamps.items() if stamp != "gone")


def _arrays(group: Any) -> dict[str, Any]:
    found = dict(group.arrays())
    for name, inner in group.groups():
        found |= {f"{name}/{path}": array for path, array in _arrays(inner).items()}
    return found


class _Checked:
    """A Zarr array whose chunks are looked at before they are decompressed."""

    def __init__(self, array: Any, tree: Tree) -> None:
        self._array, self._tree, self.path = array, tree, array.path
        self.shape, self.dtype, self.chunks, self.shards = array.shape, array.dtype, array.chunks, array.shards
        names = [f"{type(one).__name__} {getattr(one, 'codec_id', '')}".lower() for one in array.compressors]
        self._is_blosc = self.shards is None and any("blosc" in name for name in names)

    def __getitem__(self, rows: slice) -> Any:
        if self._is_blosc:
            for file in self.files(rows.start, rows.stop):
                self._check_whole(file)
        return self._array[rows]

    def files(self, begin: int, end: int) -> Iterator[str]:
        """Yield the names of the files that hold rows [begin, end): the chunks, or the shards that hold several."""
        sizes = self.shards or self.chunks
        ranges = [range(-(-length // size)) for length, size in zip(self.shape, sizes, strict=True)]
        ranges[0] = range(begin // sizes[0], -(-end // sizes[0]))
        prefix = f"{self.path}/" if self.path else ""
        for key in itertools.product(*ranges):
            try:
                yield prefix + self._array.metadata.encode_chunk_key(key)
            except AttributeError as error:  # not documented by zarr: it may move
                raise DataError(f"This zarr does not say where chunks lie ({error}): install zarr 3.") from None

    def _check_whole(self, file: str) -> None:
        """Raise a DataError if a chunk is shorter than its header says: Blosc would read on in other memory."""
        if self._tree.stamp(file) == "gone":
            return  # the fill value
        with self._tree.open(file) as opened:
            header = opened.read(16)
        expected = int.from_bytes(header[12:16], "little") if len(header) == 16 else 16
        if self._tree.size(file) < expected:
            raise DataError(f"its chunk {file} is cut off: {self._tree.size(file)} of {expected} bytes are there")

"""NumPy's .npy and .npz files, and raw files of one type: rows are the first dimension.

- One .npy: one column, `x` unless `column` names it; the fields of a structured array are columns.
- Several .npy of a folder: one column a file, named after it, all of one length.
- A pattern or a list of .npy files: their rows, file after file.
- .npz: its arrays are the columns. Raw (.bin, .raw, .dat): `dtype`, and `shape` of a row.
"""

import io
import math
import tokenize
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.data.sources.arrays import ArraySource, StoredArray
from shoal.data.sources.source import Slice
from shoal.data.sources.tree import Tree


class FileArray:
    """Rows that lie end to end in a file, from `at`: what is sliced is read, nothing else."""

    def __init__(self, file: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, ...], at: int) -> None:
        self.file, self.dtype, self.shape, self.at = file, dtype, shape, at
        self._row_bytes = dtype.itemsize * math.prod(shape[1:])

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        begin, end, _ = rows.indices(self.shape[0])
        self.file.seek(self.at + begin * self._row_bytes)
        data = self.file.read((end - begin) * self._row_bytes)
        whole = len(data) // self._row_bytes if self._row_bytes else end - begin
        if whole < end - begin:
            raise DataError(f"the file ends in row {begin + whole}, and should have {self.shape[0]} rows")
        return np.frombuffer(data, self.dtype).reshape(end - begin, *self.shape[1:])


class NpySource(ArraySource):
    """Rows of .npy files."""

    kind = "npy"

    def __init__(self, tree: Tree, names: list[str], *, column: str = "x", **options: Any) -> None:
        self._column = column
        super().__init__(tree, names, **options)

    @contextmanager
    def arrays(self, name: str) -> Iterator[dict[str, StoredArray]]:
        """Open one file."""
        with self.tree.open(name) as file:
            yield self._fields(_npy_array(file, name), self._column)

    def _fields(self, array: StoredArray, column: str) -> dict[str, StoredArray]:
        fields = array.dtype.names
        return {field: _Field(array, field) for field in fields} if fields else {column: array}


class NpyColumns(NpySource):
    """The .npy files of a folder, one column each."""

    def __init__(self, tree: Tree, names: list[str], **options: Any) -> None:
        self._files = tuple(names)
        super().__init__(tree, [""], **options)

    @contextmanager
    def arrays(self, name: str) -> Iterator[dict[str, StoredArray]]:
        """Open all files."""
        del name
        files = {file: self.tree.open(file) for file in self._files}
        try:
            yield {file.removesuffix(".npy"): _npy_array(opened, file) for file, opened in files.items()}
        finally:
            for opened in files.values():
                opened.close()

    def describe(self) -> dict[str, Any]:
        """Return the folder's name and its columns."""
        size = sum(self.tree.size(file) for file in self._files)
        return super().describe() | {"name": self.tree.name, "num_files": len(self._files), "num_bytes": size}

    def fingerprint(self, part: Slice) -> str:
        """Return sizes and times of all files."""
        del part
        return ";".join(self.tree.stamp(file) for file in self._files)


class NpzSource(ArraySource):
    """Rows of the arrays of .npz files."""

    kind = "npz"

    @contextmanager
    def arrays(self, name: str) -> Iterator[dict[str, StoredArray]]:
        """Open one file; members that are compressed are read from their beginning."""
        with self.tree.open(name) as file, zipfile.ZipFile(file) as zipped:
            members = [member for member in zipped.namelist() if member.endswith(".npy")]
            opened = {member: cast(BinaryIO, zipped.open(member)) for member in members}
            arrays = {member.removesuffix(".npy"): _npy_array(opened[member], f"{name}/{member}") for member in members}
            yield {column: array for column, array in arrays.items() if array.shape}

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return whole files: a second reader would have to decompress what the first one did."""
        del about_bytes
        return super().slices(1 << 62)


class RawSource(ArraySource):
    """Rows of files that are nothing but values."""

    kind = "raw"

    def __init__(
        self,
        tree: Tree,
        names: list[str],
        *,
        dtype: str,
        shape: tuple[int, ...] = (),
        column: str = "x",
        skip_bytes: int = 0,
        **options: Any,
    ) -> None:
        """`dtype` and `shape` are those of a row; `skip_bytes` is the length of a header."""
        try:
            self._dtype = np.dtype(dtype)
        except TypeError:
            raise ConfigError(f"dtype={dtype!r} is no type of NumPy's. Write one like 'uint16' or '<f4'.") from None
        self._shape, self._column, self._skip_bytes = tuple(shape), column, skip_bytes
        super().__init__(tree, names, **options)

    @contextmanager
    def arrays(self, name: str) -> Iterator[dict[str, StoredArray]]:
        """Open one file."""
        size = self.tree.size(name) - self._skip_bytes
        row_bytes = self._dtype.itemsize * math.prod(self._shape)
        if size < 0 or size % row_bytes:
            raise DataError(
                f"{name} has {size} bytes, and a row of {self._dtype} {list(self._shape)} has {row_bytes}: row "
                f"{max(size, 0) // row_bytes} is not whole. Check dtype, shape and skip_bytes."
            )
        with self.tree.open(name) as file:
            yield {self._column: FileArray(file, self._dtype, (size // row_bytes, *self._shape), self._skip_bytes)}

    def describe(self) -> dict[str, Any]:
        """Return the files' names and sizes, and how they are read."""
        return super().describe() | {
            "dtype": str(self._dtype),
            "shape": list(self._shape),
            "skip_bytes": self._skip_bytes,
        }


class _Field:
    """A field of a structured array."""

    def __init__(self, array: StoredArray, field: str) -> None:
        self._array, self._field = array, field
        part = array.dtype[field]
        self.dtype, self.shape = part.base, (*array.shape, *part.shape)

    def __getitem__(self, rows: slice) -> NDArray[Any]:
        return self._array[rows][self._field]  # type: ignore[no-any-return]


def _npy_array(file: BinaryIO, name: str) -> StoredArray:
    """Return the array of an opened .npy file; nothing of it is unpickled."""
    try:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, column_order, dtype = read_header(file)
    except (ValueError, EOFError, SyntaxError, tokenize.TokenError) as error:
        raise DataError(f"{name} is not a whole .npy file: {error}.") from None
    if dtype.hasobject:
        raise DataError(
            f"{name} holds Python objects, which are not unpickled here. Save it as numbers, text or bytes."
        )
    if column_order and len(shape) > 1:
        return _by_columns(file, name, dtype, shape)
    return FileArray(file, dtype, shape, file.tell())


def _by_columns(file: BinaryIO, name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array that is stored column by column: mapped where that can be, else read whole."""
    at, size = file.tell(), math.prod(shape) * dtype.itemsize
    if isinstance(file, io.BufferedReader):
        if file.seek(0, io.SEEK_END) < at + size:
            raise DataError(f"{name} is not whole: it ends before its array does.")
        return np.memmap(file, dtype, "r", at, shape, order="F")
    data = file.read(size)
    if len(data) < size:
        raise DataError(f"{name} is not whole: it ends before its array does.")
    return np.frombuffer(data, dtype).reshape(shape, order="F")

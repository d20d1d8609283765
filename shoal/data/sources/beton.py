"""FFCV's .beton files, version 2, read without FFCV: its layout is public and small.

1. A header (24 bytes): version, number of fields, page size, number of samples, where the table of allocations lies.
2. A descriptor a field (1,041 bytes): its type, its name (16 bytes, ended by a zero), its arguments (1,024 bytes).
3. A record a sample: a number, or a pointer to what lies in the pages, field after field, aligned as C does.
4. The table of allocations, to the end of the file: sample, pointer, bytes. It says how long each JPEG is.

Example: fields image (2) and label (1): a record is mode, width, height and pointer of the image (13 bytes), 3 bytes of
padding, and the label (8 bytes). JPEGs come as they are; raw images become an array where all have one size, else PNG.
"""

import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column
from shoal.data.sources.rows import array_column
from shoal.data.sources.source import Sample, Slice, cut_rows, library, one_line
from shoal.data.sources.tree import Tree, described

_HEADER = np.dtype(
    [
        ("version", "<u2"),
        ("num_fields", "<u2"),
        ("page_bytes", "<u4"),
        ("num_samples", "<u8"),
        ("allocations_at", "<u8"),
    ]
)
_FIELD = np.dtype([("type", "u1"), ("name", "S16"), ("arguments", "u1", 1024)])
_ALLOCATION = np.dtype([("sample", "<u8"), ("pointer", "<u8"), ("num_bytes", "<u8")])
_IMAGE = np.dtype([("mode", "u1"), ("width", "<u2"), ("height", "<u2"), ("pointer", "<u8")])
_BYTES = np.dtype([("pointer", "<u8"), ("num_bytes", "<u8")])
_RECORDS = {
    0: np.dtype("<f8"),
    1: np.dtype("<i8"),
    2: _IMAGE,
    3: _BYTES,
    4: np.dtype("<u8"),
    5: _BYTES,
    6: np.dtype("<u8"),
}
_FLOAT, _INTEGER, _RGB, _RAW_BYTES, _ARRAY, _JSON, _TENSOR = range(7)
_JPEG_MODE = 0


@dataclass(frozen=True)
class _Table:
    """What the file says of its samples."""

    fields: tuple[tuple[str, int, Any], ...]
    """Name, type, and for arrays (dtype, shape)."""
    records: NDArray[Any]
    sizes: Mapping[int, int]
    """Bytes at each pointer."""
    num_bytes: int
    """Of the file."""


class BetonSource:
    """The samples of a .beton file."""

    def __init__(self, tree: Tree, name: str) -> None:
        self.tree, self.name = tree, name
        self._table: _Table | None = None
        self._columns = tuple(self._column(at, *field) for at, field in enumerate(self._opened().fields))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}

    @property
    def columns(self) -> tuple[Column, ...]:
        """What the file's fields are."""
        return self._columns

    def describe(self) -> dict[str, Any]:
        """Return the file's name and size."""
        num_rows = len(self._opened().records)
        return described(
            "beton", self.tree, [self.name], num_rows=num_rows, columns=[column.name for column in self._columns]
        )

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return ranges of samples."""
        num_rows = len(self._opened().records)
        return cut_rows(num_rows, self.tree.size(self.name) / max(num_rows, 1), about_bytes, items=(self.name,))

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the samples of a range."""
        table = self._opened()
        with self.tree.open(self.name) as file:
            for row in range(part.begin, part.end):
                label = f"{self.name}: row {row}"
                try:
                    yield (
                        label,
                        {
                            column.name: self._value(file, table, row, at, label)
                            for at, column in enumerate(self._columns)
                        },
                    )
                except DataError as error:
                    yield label, error

    def fingerprint(self, part: Slice) -> str:
        """Return size and time of the file."""
        del part
        return self.tree.stamp(self.name)

    def _opened(self) -> _Table:
        if self._table is None:
            with self.tree.open(self.name) as file:
                self._table = _read_table(file, self.name, self.tree.size(self.name))
        return self._table

    def _column(self, at: int, name: str, kind: int, arguments: Any) -> Column:
        if kind == _RGB:
            images = self._opened().records[f"f{at}"]
            sizes = set(zip(images["height"].tolist(), images["width"].tolist(), strict=True))
            if len(sizes) == 1 and (images["mode"] != _JPEG_MODE).all():
                return Column(name, "array", "uint8", (*next(iter(sizes)), 3))
            return Column(name, "image")
        if kind in (_ARRAY, _TENSOR):
            return array_column(name, *arguments)
        if kind in (_FLOAT, _INTEGER):
            return Column(name, "scalar", "float64" if kind == _FLOAT else "int64")
        return Column(name, "bytes" if kind == _RAW_BYTES else "text")

    def _value(self, file: BinaryIO, table: _Table, row: int, at: int, label: str) -> Any:
        (name, kind, arguments), record = table.fields[at], table.records[row][at]

        def read(pointer: Any, num_bytes: int) -> bytes:
            end = int(pointer) + num_bytes
            if end > table.num_bytes:  # before anything is read: the file may ask for more than there is memory
                raise DataError(f"{label}: {name!r} is cut off: it ends at byte {end}, the file at {table.num_bytes}.")
            file.seek(int(pointer))
            return file.read(num_bytes)

        if kind in (_FLOAT, _INTEGER):
            return record
        if kind == _RGB:
            return self._image(read, table, record, self._columns[at].kind, label)
        if kind in (_RAW_BYTES, _JSON):
            data = read(record["pointer"], int(record["num_bytes"]))
            return data if kind == _RAW_BYTES else _text(data.partition(b"\0")[0], f"{label}: {name!r}")
        dtype, shape = arguments
        return np.frombuffer(read(record, dtype.itemsize * int(np.prod(shape))), dtype).reshape(shape)

    def _image(self, read: Callable[[Any, int], bytes], table: _Table, record: Any, kind: str, label: str) -> Any:
        shape = (int(record["height"]), int(record["width"]), 3)
        if record["mode"] == _JPEG_MODE:
            size = table.sizes.get(int(record["pointer"]))
            if size is None:
                raise DataError(f"{label}: its JPEG is not in the table of allocations.")
            return read(record["pointer"], size)
        if 0 in shape:
            raise DataError(f"{label}: its image is of {shape[1]} x {shape[0]} pixels.")
        pixels = np.frombuffer(read(record["pointer"], int(np.prod(shape))), np.uint8).reshape(shape)
        return pixels if kind == "array" else _png(pixels)


def _text(data: bytes, what: str) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{what} is not UTF-8: byte {error.start} is {data[error.start]:#x}.") from None


def _read_table(file: BinaryIO, name: str, size: int) -> _Table:
    header = _read(file, (name, size), 0, _HEADER, 1)[0]
    if header["version"] != 2:
        raise DataError(f"{name} is not a .beton file of version 2: its version is {header['version']}.")
    descriptors = _read(file, (name, size), _HEADER.itemsize, _FIELD, int(header["num_fields"]))
    fields = tuple(_field(name, one) for one in descriptors)
    records = np.dtype([("", _RECORDS[kind]) for _, kind, _ in fields], align=True)
    begin = _HEADER.itemsize + descriptors.nbytes
    found = _read(file, (name, size), begin, records, int(header["num_samples"]))
    at = int(header["allocations_at"])
    if not begin + found.nbytes <= at <= size or (size - at) % _ALLOCATION.itemsize:
        raise DataError(f"{name} is cut off: its table of allocations should be at byte {at}, and the file has {size}.")
    allocations = _read(file, (name, size), at, _ALLOCATION, (size - at) // _ALLOCATION.itemsize)
    sizes = dict(zip(allocations["pointer"].tolist(), allocations["num_bytes"].tolist(), strict=True))
    return _Table(fields, found, sizes, size)


def _field(name: str, descriptor: Any) -> tuple[str, int, Any]:
    column, kind = descriptor["name"].decode("ascii", "replace"), int(descriptor["type"])
    if kind not in _RECORDS:
        raise ConfigError(f"{name}: field {column!r} is of a type of its own ({kind}), which only its maker can read.")
    if kind not in (_ARRAY, _TENSOR):
        return column, kind, None
    try:
        return column, kind, _array_arguments(descriptor["arguments"])
    except (ValueError, TypeError, IndexError, KeyError) as error:
        raise DataError(f"{name}: the description of field {column!r} is damaged: {one_line(error)}.") from None


def _array_arguments(arguments: NDArray[Any]) -> tuple[np.dtype[Any], tuple[int, ...]]:
    """Return dtype and shape: 32 lengths (the unused are 0), the length of a JSON text, and the text, [["", "<f4"]]."""
    numbers = arguments[: 33 * 8].view("<u8")
    shape = tuple(int(length) for length in numbers[:32] if length)
    text = arguments[33 * 8 : 33 * 8 + int(numbers[32])].tobytes()
    return np.dtype(json.loads(text)[0][1]), shape


def _read(file: BinaryIO, name_and_size: tuple[str, int], at: int, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
    name, size = name_and_size
    if at + count * dtype.itemsize > size:
        raise DataError(
            f"{name} is cut off: it ends at byte {size}, and should reach byte {at + count * dtype.itemsize}."
        )
    file.seek(at)
    return np.frombuffer(file.read(count * dtype.itemsize), dtype)


def _png(pixels: NDArray[np.uint8]) -> bytes:
    image = library("PIL.Image", extra="images", what="raw images of different sizes")
    file = io.BytesIO()
    image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()

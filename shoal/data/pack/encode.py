"""Samples to columns: each value is checked against its column, and rows become one block of contiguous arrays.

1. `encode_rows` takes samples one by one: a value that does not fit is named with its sample's label, before anything
   of that sample is stored.
2. `encode_batch` takes many rows of a source that has them in arrays: dtype and shape are checked once for all of them.

Both give the same block for the same rows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.data.pack.image import EncodedImages
from shoal.data.pack.infer import as_array, dtype_of
from shoal.data.pack.schema import Column, Flat, Stored, stored_columns, stored_dtype
from shoal.native.jpeg_restart import Memory, fresh

CHUNK_ROWS = 1024
CHUNK_BYTES = 4 << 20
IMAGE_CHUNK_BYTES = 1 << 20
"""Of images, of which a dozen chunks are on their way at once."""

Held = NDArray[Any] | Flat
Sample = tuple[str, Mapping[str, Any] | DataError]
"""A label that names the row, and its values; or why it cannot be read."""
Batch = tuple[int, Callable[[int], str], Mapping[str, Any]]
"""How many rows, what names each, and for each column an array, a Flat, or a list of values."""


@dataclass(frozen=True)
class Block:
    """Some rows, by stored column."""

    num_rows: int
    held: dict[str, Held]

    @property
    def is_fixed(self) -> bool:
        """Whether all rows take the same number of bytes."""
        return not any(isinstance(held, Flat) for held in self.held.values())

    def row_bytes(self) -> NDArray[np.int64]:
        """Return the bytes that each row takes in a part."""
        sizes = np.zeros(self.num_rows, np.int64)
        for held in self.held.values():
            if isinstance(held, Flat):
                sizes += np.diff(held.offsets) * held.values.itemsize + 8
            else:
                sizes += held.itemsize * math.prod(held.shape[1:])
        return sizes


@dataclass(frozen=True)
class Encoded:
    """Some samples as a block, and those of them that did not fit into it."""

    block: Block
    samples: int
    """How many there were."""
    kept: NDArray[np.int64]
    """Which of them each row of the block is."""
    errors: list[str]
    """Why the others are not there."""


def encode_rows(
    columns: Sequence[Column], samples: Sequence[Sample], *, is_strict: bool = True, memory: Memory = fresh
) -> Encoded:
    """Return the samples as a block; those that do not fit raise, or, if not `is_strict`, are left out and named.

    All images of a column are encoded by one call into C, into `memory`, during which other threads of Python go on.
    """
    rows: dict[int, list[list[Any]]] = {}
    errors: dict[int, DataError] = {}
    for number, sample in enumerate(samples):
        try:
            rows[number] = _encode_sample(columns, sample)
        except DataError as error:
            errors[number] = error
            if is_strict:
                break
    given = np.array(list(rows), np.int64)
    images: dict[int, EncodedImages] = {}
    for place, column in enumerate(columns):
        if column.kind == "image":
            blocks = int(column.extra.get("restart_blocks", 0))
            images[place] = EncodedImages([row[place][0] for row in rows.values()], blocks, memory=memory)
            for at, why in images[place].errors.items():
                errors.setdefault(int(given[at]), DataError(f"column {column.name!r}: {why}"))
    if errors and is_strict:
        raise _named(samples, errors, min(errors))
    kept = np.flatnonzero([number not in errors for number in rows])
    good = [row for number, row in rows.items() if number not in errors]
    held: dict[str, Held] = {}
    for place, column in enumerate(columns):
        stored = stored_columns([column])
        joined = images[place].collect(kept) if place in images else _joined(stored, place, good)
        held |= {each.name: flat for each, flat in zip(stored, joined, strict=False)}  # not every image has an index
    said = [str(_named(samples, errors, number)) for number in sorted(errors)]
    return Encoded(Block(len(good), held), len(samples), given[kept], said)


def _named(samples: Sequence[Sample], errors: dict[int, DataError], number: int) -> DataError:
    label, said = samples[number][0], str(errors[number]).removesuffix(".")
    return DataError(f"{said}." if said.startswith(label) else f"{label}: {said}.")


def _joined(stored: Sequence[Stored], place: int, rows: list[list[list[Any]]]) -> list[Held]:
    """Return a column of rows as it is stored."""
    return [_join(each, [row[place][piece] for row in rows]) for piece, each in enumerate(stored)]


def encode_batch(columns: Sequence[Column], batch: Batch) -> Encoded:
    """Return a batch of rows as a block. Raises where a row does not fit: `encode_rows` then says which."""
    num_rows, _, values = batch
    held: dict[str, Held] = {}
    for column in columns:
        if column.name not in values:
            raise DataError(f"there is no column {column.name!r}")
        given = values[column.name]
        if isinstance(given, np.ndarray) and column.is_fixed:
            held[column.name] = _check_array(column, given, given.dtype.name, (num_rows, *column.shape))
        elif isinstance(given, Flat) and column.kind != "image" and column.ndim == 1:
            flat = _check_array(column, given.values, given.values.dtype.name, given.values.shape)
            held[column.name] = Flat(flat, given.offsets)
        elif isinstance(given, Sequence) and not column.is_fixed and column.kind != "image" and column.ndim == 1:
            (stored,) = stored_columns([column])
            held[column.name] = _join(stored, [_encode_value(column, {column.name: value})[0] for value in given])
        else:
            raise DataError(f"column {column.name!r} is encoded row by row")
    return Encoded(Block(num_rows, held), num_rows, np.arange(num_rows), [])


def without_first(batch: Batch, count: int) -> Batch:
    """Return a batch without its first rows."""
    num_rows, label, values = batch
    if count == 0:
        return batch

    def rest(given: Any) -> Any:
        return Flat(given.values, given.offsets[count:]) if isinstance(given, Flat) else given[count:]

    return num_rows - count, lambda row: label(row + count), {name: rest(given) for name, given in values.items()}


def batch_rows(batch: Batch) -> list[Sample]:
    """Return the rows of a batch as samples."""
    num_rows, label, values = batch
    return [(label(row), {name: _at(given, row) for name, given in values.items()}) for row in range(num_rows)]


def _at(given: Any, row: int) -> Any:
    return given.values[given.offsets[row] : given.offsets[row + 1]] if isinstance(given, Flat) else given[row]


def _encode_sample(columns: Sequence[Column], sample: Sample) -> list[list[Any]]:
    """Return, for each column, the values of its stored columns; of an image only itself, which is encoded later."""
    values = sample[1]
    if isinstance(values, DataError):
        raise values
    return [_encode_value(column, values) for column in columns]


def _encode_value(column: Column, values: Mapping[str, Any]) -> list[Any]:
    if column.name not in values:
        raise DataError(f"there is no column {column.name!r}; it has {', '.join(map(str, values))}")
    value = values[column.name]
    if column.kind == "text":
        return [_text(column, value)]
    if column.kind in ("bytes", "image"):
        return _bytes(column, value)
    array = as_array(value, column.name)
    wanted = column.shape if column.is_fixed else array.shape
    if not column.is_fixed and array.ndim != column.ndim:
        raise DataError(f"column {column.name!r} has {array.ndim} dimensions, the pack's has {column.ndim}")
    flat = _check_array(column, array, dtype_of(value, array), wanted, is_python=not hasattr(value, "dtype"))
    if column.is_fixed:
        return [flat]
    return [flat.reshape(-1)] if column.ndim == 1 else [flat.reshape(-1), np.array(array.shape, np.int64)]


def _text(column: Column, value: Any) -> bytes:
    try:
        if isinstance(value, str):
            return value.encode()
        if isinstance(value, np.ndarray) and value.dtype == np.uint8:  # a row of a Flat
            value.tobytes().decode()
            return value.tobytes()
    except UnicodeEncodeError as error:  # half of a pair of UTF-16, as JSON can spell it
        alone = value[error.start].encode("unicode_escape").decode()
        raise DataError(f"column {column.name!r}: character {error.start} is {alone}, which no text has") from None
    except UnicodeDecodeError as error:
        raise DataError(f"column {column.name!r} is not UTF-8: byte {error.start} is wrong") from None
    raise DataError(f"column {column.name!r} has a {type(value).__name__}, not a str")


def _bytes(column: Column, value: Any) -> list[bytes]:
    if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.ndim == 1:
        value = value.tobytes()
    if not isinstance(value, bytes | bytearray | memoryview):
        what = "an encoded image (bytes)" if column.kind == "image" else "bytes"
        raise DataError(f"column {column.name!r} has a {type(value).__name__}, not {what}")
    return [bytes(value)]


def _check_array(
    column: Column, array: NDArray[Any], dtype: str, shape: tuple[int, ...], *, is_python: bool = False
) -> NDArray[Any]:
    """Return the array in the column's dtype, if it has the shape, and its numbers fit."""
    if array.shape != shape:
        hint = ". If its shape varies, make the column ragged" if column.kind == "array" else ""
        raise DataError(f"column {column.name!r} has shape {array.shape}, the pack's is {shape}{hint}")
    wanted = stored_dtype(column.dtype)
    if column.kind in ("text", "bytes"):
        wanted = np.dtype(np.uint8)
    if dtype == column.dtype or (column.dtype == "bfloat16" and dtype == "uint16"):
        return array
    if column.dtype != "bfloat16" and (np.can_cast(array.dtype, wanted, "safe") or _fits(array, wanted, is_python)):
        return array.astype(wanted)
    raise DataError(f"column {column.name!r} has dtype {dtype}, the pack's is {column.dtype}")


def _fits(array: NDArray[Any], wanted: np.dtype[Any], is_python: bool) -> bool:
    """Return whether a Python number, which has no size of its own, may be stored as `wanted`."""
    if not is_python or array.dtype.kind == "b" or wanted.kind == "b":
        return False
    if wanted.kind == "f":
        return True
    if array.dtype.kind == "f" or array.size == 0:
        return array.size == 0
    limits = np.iinfo(wanted)
    return bool(array.min() >= limits.min and array.max() <= limits.max)


def _join(stored: Stored, values: list[Any]) -> Held:
    if stored.is_fixed:
        return np.array(values, dtype=stored.dtype).reshape(len(values), *stored.shape)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    if stored.dtype == np.uint8 and (not values or isinstance(values[0], bytes)):
        return Flat(np.frombuffer(b"".join(values), np.uint8), offsets)
    joined = np.concatenate(values) if values else np.empty(0)
    return Flat(joined.astype(stored.dtype, copy=False), offsets)


def chunks(samples: Iterator[Sample], *, chunk_bytes: int = CHUNK_BYTES) -> Iterator[list[Sample]]:
    """Yield samples in lists of at most CHUNK_ROWS, and of about `chunk_bytes` where they are large."""
    chunk: list[Sample] = []
    num_bytes = 0
    for sample in samples:
        chunk.append(sample)
        if not isinstance(sample[1], DataError):
            num_bytes += sum(size_of(value) for value in sample[1].values())
        if len(chunk) >= CHUNK_ROWS or num_bytes >= chunk_bytes:
            yield chunk
            chunk, num_bytes = [], 0
    if chunk:
        yield chunk


def size_of(value: Any) -> int:
    """Return about how many bytes a value takes."""
    size = getattr(value, "nbytes", None)
    return int(size) if size is not None else len(value) if hasattr(value, "__len__") else 8

"""What a pack's columns are, and how each of them is stored in Arrow.

| kind | a sample's value | stored as |
|---|---|---|
| `scalar` | a number | a primitive column |
| `array` | an array of one shape | FixedSizeList, flattened in C order |
| `ragged` | an array of any shape | LargeList, and for more than one dimension another LargeList, `NAME.shape` |
| `tokens` | integers, one row a document | LargeList: its child is the stream of the part's tokens |
| `image` | an encoded image | LargeBinary, and for JPEGs with restart segments their index, `NAME.index` |
| `text` | a str | LargeString |
| `bytes` | bytes | LargeBinary |

Booleans are stored as uint8 and bfloat16 as uint16: Arrow's booleans are bits, and it has no bfloat16.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shoal.core.errors import DataError, did_you_mean

KINDS = ("scalar", "array", "ragged", "tokens", "image", "text", "bytes")
COMPRESSIONS = ("none", "lz4", "zstd")
_STORED_AS = {"bool": "uint8", "bfloat16": "uint16"}
_ARROW = {
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
}
DTYPES = (*_ARROW, *_STORED_AS)
_BINARY = {"image": pa.large_binary(), "bytes": pa.large_binary(), "text": pa.large_string()}


@dataclass(frozen=True)
class Column:
    """A column as people see it."""

    name: str
    kind: str
    dtype: str = "uint8"
    """Of the elements; of text, bytes and images it is uint8."""
    shape: tuple[int, ...] = ()
    """Of an `array`."""
    compression: str = "none"
    extra: dict[str, Any] = field(default_factory=dict)
    """`ndim` of a ragged column, `index` (is there one?) and `restart_blocks` of an image, and what sources say."""

    def __post_init__(self) -> None:
        _check_word("kind", self.kind, KINDS, self.name)
        _check_word("dtype", self.dtype, DTYPES, self.name)
        _check_word("compression", self.compression, COMPRESSIONS, self.name)
        if not self.name:
            raise DataError("a column has no name.")
        if (self.kind == "array") != bool(self.shape) or any(size < 1 for size in self.shape):
            raise DataError(f"column {self.name!r} of kind {self.kind} has the shape {self.shape}.")
        if self.kind == "tokens" and "int" not in self.dtype:
            raise DataError(f"column {self.name!r}: tokens are integers, not {self.dtype}.")

    @property
    def is_fixed(self) -> bool:
        """Whether every row takes the same number of bytes."""
        return self.kind in ("scalar", "array")

    @property
    def ndim(self) -> int:
        """The number of dimensions of a row's value, text and bytes counting as one."""
        return len(self.shape) if self.is_fixed else int(self.extra.get("ndim", 1))


def _check_word(what: str, word: str, known: Sequence[str], column: str) -> None:
    if word not in known:
        raise DataError(f"column {column!r} has the {what} {word!r}.{did_you_mean(word, list(known))}")


@dataclass(frozen=True)
class Stored:
    """A column as a part holds it: a column's values, or what goes with them (`NAME.shape`, `NAME.index`)."""

    name: str
    dtype: np.dtype[Any]
    type: pa.DataType
    shape: tuple[int, ...]
    is_fixed: bool
    compression: str

    @property
    def row_elements(self) -> int:
        """How many elements a row of a fixed column has."""
        return math.prod(self.shape)

    @property
    def arrow_field(self) -> pa.Field:
        """The field of the Arrow schema. No value is missing."""
        return pa.field(self.name, self.type, nullable=False)


@dataclass(frozen=True)
class Flat:
    """Rows of different lengths: row i is values[offsets[i] : offsets[i + 1]]."""

    values: NDArray[Any]
    """uint8 for text and bytes."""
    offsets: NDArray[np.int64]
    """One more than there are rows; it need not begin at 0."""


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """Return the NumPy dtype of elements of `dtype`: itself, but for bfloat16, which comes as uint16."""
    return np.dtype("uint16" if dtype == "bfloat16" else dtype)


def stored_columns(columns: Sequence[Column]) -> tuple[Stored, ...]:
    """Return what a part holds, the fixed columns first: their buffers are then aligned to 64 bytes.

    Arrow's writer does not pad the offsets of lists, so what follows them is aligned to 8 bytes only.
    """
    every = [stored for column in columns for stored in _stored(column)]
    names = [stored.name for stored in every]
    for name in names:
        if names.count(name) > 1:
            raise DataError(f"two columns are called {name!r}. Give one of them another name.")
    return tuple(sorted(every, key=lambda stored: not stored.is_fixed))


def _stored(column: Column) -> list[Stored]:
    dtype = stored_dtype(column.dtype)
    element = _ARROW[_STORED_AS.get(column.dtype, column.dtype)]
    item = pa.field("item", element, nullable=False)
    packed = column.compression
    if column.kind == "scalar":
        return [Stored(column.name, dtype, element, (), True, packed)]
    if column.kind == "array":
        return [Stored(column.name, dtype, pa.list_(item, math.prod(column.shape)), column.shape, True, packed)]
    every = [Stored(column.name, dtype, _BINARY.get(column.kind, pa.large_list(item)), (), False, packed)]
    if column.ndim > 1:
        sizes = pa.large_list(pa.field("item", pa.int64(), nullable=False))
        every.append(Stored(f"{column.name}.shape", np.dtype(np.int64), sizes, (), False, packed))
    if column.extra.get("index"):
        every.append(Stored(f"{column.name}.index", np.dtype(np.uint8), pa.large_binary(), (), False, packed))
    return every

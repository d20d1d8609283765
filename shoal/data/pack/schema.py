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
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import pyarrow as pa

KINDS = ("scalar", "array", "ragged", "tokens", "image", "text", "bytes")
COMPRESSIONS = ("none", "lz4", "zstd")
_STORED_AS = {"bool": "uint8", "bfloat16": "uint16"}
_NUMBERS = (
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64"),
)
DTYPES = (*_NUMBERS, *_STORED_AS)
_BINARY = {"image": "large_binary", "bytes": "large_binary", "text": "large_string"}


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
        if math.prod(self.shape) >= 2**31:
            raise DataError(
                f"column {self.name!r} has the shape {self.shape}: Arrow takes fewer than 2^31 elements a row."
            )
        if self.kind in _BINARY and self.dtype != "uint8":
            raise DataError(f"column {self.name!r} of kind {self.kind} has the dtype {self.dtype}: it is uint8.")
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
    layout: str
    """How Arrow holds it: "number", "fixed_list", "large_list", "large_binary" or "large_string"."""
    shape: tuple[int, ...]
    is_fixed: bool
    compression: str
    is_stream: bool = False
    """Whether it is of tokens: a row is a document of the part's stream."""

    @property
    def row_elements(self) -> int:
        """How many elements a row of a fixed column has."""
        return math.prod(self.shape)

    @property
    def element(self) -> np.dtype[Any]:
        """What Arrow holds a number as."""
        return np.dtype(_STORED_AS.get(self.dtype.name, self.dtype))

    @property
    def type(self) -> "pa.DataType":
        """The type of the Arrow schema."""
        import pyarrow as pa  # where packs are made; who reads one does without (arrow_file.py)

        if self.layout.startswith("large_") and self.layout != "large_list":
            return getattr(pa, self.layout)()
        element = getattr(pa, self.element.name)()
        if self.layout == "number":
            return element
        item = pa.field("item", element, nullable=False)
        return pa.large_list(item) if self.layout == "large_list" else pa.list_(item, self.row_elements)

    @property
    def arrow_field(self) -> "pa.Field":
        """The field of the Arrow schema. No value is missing."""
        import pyarrow as pa

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
    dtype, packed = stored_dtype(column.dtype), column.compression
    if column.is_fixed:
        layout = "number" if column.kind == "scalar" else "fixed_list"
        return [Stored(column.name, dtype, layout, column.shape, True, packed)]
    layout, is_stream = _BINARY.get(column.kind, "large_list"), column.kind == "tokens"
    every = [Stored(column.name, dtype, layout, (), False, packed, is_stream)]
    if column.ndim > 1:
        every.append(Stored(f"{column.name}.shape", np.dtype(np.int64), "large_list", (), False, packed))
    if column.extra.get("index"):
        every.append(Stored(f"{column.name}.index", np.dtype(np.uint8), "large_binary", (), False, packed))
    return every

"""Where the columns of an uncompressed part lie, read from the tables of its Arrow file.

Arrow can do that itself, but importing it takes 5 MB in every process that loads, and 25 ms (2026-11). So:

1. The file ends with its footer, a FlatBuffer: the schema, and where the one record batch is.
2. The record batch begins with another, which says where in its body each buffer lies.
3. Both are compared with what the manifest says. Whatever is not exactly as a pack's writer leaves it is left to Arrow
   (mapped.py), which reads it, or says what is wrong with it.

Example: 10 rows of float32 arrays [128] are two nodes (10 lists, 1,280 numbers) and three buffers (which lists are
missing: none; which numbers: none; 5,120 bytes of numbers).
"""

import mmap
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.data.pack.schema import Stored

_MAGIC = b"ARROW1"
_RECORD_BATCH = 3
_INT, _FLOAT = 2, 3
_LAYOUTS = {"fixed_list": 16, "large_binary": 19, "large_string": 20, "large_list": 21}
"""Arrow's numbers of types, as of the two above (format/Schema.fbs)."""
_FLOAT_BYTES = {0: 2, 1: 4, 2: 8}
"""Of Arrow's precisions."""


@dataclass(frozen=True)
class Buffers:
    """What holds a column's rows."""

    values: NDArray[Any]
    offsets: NDArray[np.int64] | None


class _Unusual(Exception):
    """Something that a pack's writer does not write: Arrow is asked then."""


def find_buffers(mapped: mmap.mmap, stored: Sequence[Stored], num_rows: int) -> dict[str, Buffers] | None:
    """Return views of the buffers of all columns; None unless the file is exactly what the manifest says."""
    try:
        footer = _footer(mapped)
        fields = footer.table(1).tables(1)
        _expect(footer.table(1).number("<h", 0) == 0)  # little-endian
        _expect(len(fields) == len(stored) and all(map(_is_field, fields, stored)))
        reading = _Reading(mapped, footer, num_rows)
        found = {each.name: reading.column(each) for each in stored}
        reading.end()
        return found
    except (_Unusual, struct.error):
        return None


class _Table:
    """A FlatBuffer's table: at `at` of `data`. Fields are counted as in its definition; one that is not there is 0."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data, self._at = data, at
        self._fields = at - self._read("<i", at)
        self._size = self._read("<H", self._fields)

    def number(self, form: str, field: int) -> int:
        """Return a number."""
        place = self._place(field)
        return self._read(form, place) if place else 0

    def has(self, field: int) -> bool:
        """Whether a field is there."""
        return bool(self._place(field))

    def table(self, field: int) -> "_Table":
        """Return a table that must be there."""
        return _Table(self._data, self._target(self._place(field)))

    def tables(self, field: int) -> list["_Table"]:
        """Return a list of tables."""
        first, count = self._list(field)
        return [_Table(self._data, self._target(first + 4 * i)) for i in range(count)]

    def structs(self, field: int, form: str) -> list[tuple[int, ...]]:
        """Return a list of what `form` describes."""
        first, count = self._list(field)
        size = struct.calcsize(form)
        _expect(first + count * size <= len(self._data))
        return [struct.unpack_from(form, self._data, first + size * i) for i in range(count)]

    def text(self, field: int) -> bytes:
        """Return a str, encoded."""
        first, count = self._list(field)
        _expect(first + count <= len(self._data))
        return self._data[first : first + count]

    def _list(self, field: int) -> tuple[int, int]:
        """Return where a list begins, and how many it holds."""
        place = self._place(field)
        if not place:
            return 0, 0
        at = self._target(place)
        return at + 4, self._read("<I", at)

    def _place(self, field: int) -> int:
        entry = 4 + 2 * field
        inside = self._read("<H", self._fields + entry) if entry < self._size else 0
        return self._at + inside if inside else 0

    def _target(self, place: int) -> int:
        _expect(place > 0)
        return place + self._read("<I", place)

    def _read(self, form: str, at: int) -> int:
        _expect(at >= 0)  # struct counts those from the end
        return int(struct.unpack_from(form, self._data, at)[0])


class _Reading:
    """The buffers of a file's one record batch, taken one after the other."""

    def __init__(self, mapped: mmap.mmap, footer: _Table, num_rows: int) -> None:
        blocks = footer.structs(3, "<qi4xq")
        _expect(len(blocks) == 1)
        ((begin, header_bytes, body_bytes),) = blocks
        self._mapped, self._body, self._end = mapped, begin + header_bytes, begin + header_bytes + body_bytes
        _expect(begin >= 0 and header_bytes > 8 and body_bytes >= 0 and self._end <= len(mapped))
        header = mapped[begin + 8 : begin + header_bytes]  # after a mark and its length
        message = _Table(header, struct.unpack_from("<I", header)[0])
        batch = message.table(2)
        _expect(message.number("<B", 1) == _RECORD_BATCH and batch.number("<q", 0) == num_rows)
        _expect(not batch.has(3))  # compression
        self._num_rows = num_rows
        self._nodes, self._buffers = batch.structs(1, "<qq")[::-1], batch.structs(2, "<qq")[::-1]

    def column(self, stored: Stored) -> Buffers:
        """Return the next column."""
        self._node(self._num_rows)
        if stored.is_fixed:
            count = self._num_rows * stored.row_elements
            if stored.layout == "fixed_list":
                self._node(count)
            values = self._array(stored.dtype, count)
            return Buffers(values.reshape(self._num_rows, *stored.shape), None)
        offsets = self._array(np.dtype(np.int64), self._num_rows + 1)
        first, last = int(offsets[0]), int(offsets[-1])
        _expect(0 <= first <= last)
        if stored.layout == "large_list":
            self._node(last)
        return Buffers(self._array(stored.dtype, last), offsets)

    def end(self) -> None:
        """Refuse what is left over."""
        _expect(not self._nodes and not self._buffers)

    def _node(self, length: int) -> None:
        """Take a node of so many values, none of which is missing."""
        _expect(bool(self._nodes) and self._nodes.pop() == (length, 0))
        _expect(bool(self._buffers) and self._buffers.pop()[1] == 0)  # which of them are missing

    def _array(self, dtype: np.dtype[Any], count: int) -> NDArray[Any]:
        _expect(bool(self._buffers))
        begin, num_bytes = self._buffers.pop()
        at = self._body + begin
        _expect(begin >= 0 and num_bytes >= count * dtype.itemsize and at + num_bytes <= self._end)
        return np.frombuffer(self._mapped, dtype=dtype, count=count, offset=at)


def _footer(mapped: mmap.mmap) -> _Table:
    size = len(mapped)
    _expect(size > 32 and mapped[: len(_MAGIC)] == _MAGIC and mapped[size - len(_MAGIC) :] == _MAGIC)
    end = size - len(_MAGIC) - 4
    num_bytes = struct.unpack("<i", mapped[end : end + 4])[0]
    _expect(0 < num_bytes <= end - 8)
    data = mapped[end - num_bytes : end]
    return _Table(data, struct.unpack_from("<I", data)[0])


def _is_field(field: _Table, stored: Stored) -> bool:
    """Whether a field of the schema is the column, none of whose values is missing."""
    if field.text(0) != stored.name.encode() or field.number("<B", 1) or field.has(4):  # nullable, a dictionary
        return False
    children = field.tables(5)
    if stored.layout == "number":
        return not children and _is_number(field, stored.element)
    kind = field.table(3)
    if field.number("<B", 2) != _LAYOUTS[stored.layout]:
        return False
    if stored.layout == "fixed_list" and kind.number("<i", 0) != stored.row_elements:
        return False
    if stored.layout in ("large_binary", "large_string"):
        return not children
    return len(children) == 1 and _is_item(children[0], stored.element)


def _is_item(field: _Table, element: np.dtype[Any]) -> bool:
    is_plain = not (field.number("<B", 1) or field.has(4) or field.tables(5))
    return is_plain and field.text(0) == b"item" and _is_number(field, element)


def _is_number(field: _Table, element: np.dtype[Any]) -> bool:
    number, kind = field.number("<B", 2), field.table(3)
    if number == _INT and element.kind in "iu":
        return (kind.number("<i", 0), kind.number("<B", 1)) == (8 * element.itemsize, int(element.kind == "i"))
    return number == _FLOAT and element.kind == "f" and _FLOAT_BYTES.get(kind.number("<h", 0)) == element.itemsize


def _expect(is_so: bool) -> None:
    if not is_so:
        raise _Unusual

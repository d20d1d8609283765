"""The files of a part: Arrow's, one for the uncompressed columns, one for those of each compression.

1. `places` says where the values of columns will begin in the file of a part with so many rows: Arrow's own writer is
   given rows of zeros, and a file that only counts. Fixed columns come first, so their places and that of the first
   column of variable length depend on the number of rows alone. These are written while the part is made.
2. `write_part` gives Arrow the uncompressed columns as one record batch, and a file that steps over what is there
   already; what was summed up of it is joined to the checksum. Columns in memory are summed up by one thread while
   another writes them. Those of each compression become record batches of `block_rows` rows.
3. If the part has other rows than were planned, and so other places, what is in the file is taken back into memory, and
   all is written then.
4. The body of a record batch begins at a multiple of 64 bytes: the schema's metadata is padded for that. As buffers of
   fixed columns are padded by Arrow, they lie at multiples of 64, too.

Example: a pack of float32 arrays [128] and int64 labels. A part of 500,000 rows is a file of 260 MB: a header of some
hundred bytes, 256 MB of arrays, 4 MB of labels, and a footer that says where they begin. Only header and footer are
written at the end.
"""

import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from shoal.data.pack.checksum import Checksum
from shoal.data.pack.manifest import Part, PartFile, part_file
from shoal.data.pack.part_buffers import PartBuffers
from shoal.data.pack.part_stream import ALIGNMENT, Streamed, write_at
from shoal.data.pack.schema import Stored

_LARGE_BYTES = 4 << 20
"""What is larger is summed up while it is written."""
ZSTD_LEVEL = 3


def places(stored: Sequence[Stored], num_rows: int | None) -> dict[str, int]:
    """Return where values begin in the uncompressed file of a part of `num_rows`, of columns of which that says it.

    None: nobody knows how many. A fixed column that is the first begins at the same place then, too.
    """
    plain = [each for each in stored if each.compression == "none"]
    fixed = sum(each.is_fixed for each in plain)
    told = plain[: fixed + 1] if num_rows is not None else plain[: min(fixed, 1)]
    if not told:
        return {}
    blank = PartBuffers(plain)
    blank.imagine(num_rows or 1)
    batch, sink = blank.record_batch("none"), _Counted()
    _write_arrow(sink, batch, "none", batch.num_rows)
    return {each.name: sink.places[_values(batch.column(each.name)).address] for each in told}


def _values(column: pa.Array) -> pa.Buffer:
    return column.buffers()[-1]


def write_part(folder: Path, name: str, buffers: PartBuffers, block_rows: dict[str, int]) -> Part:
    """Write the files of a part into the pack's `folder`, and return what the manifest will say of it.

    What fails leaves none of them.
    """
    files = []
    try:
        for compression in sorted({each.compression for each in buffers.stored}):
            file = part_file(name, compression)
            files.append(PartFile(file, 0, ""))
            there = _there(buffers) if compression == "none" else []
            batch = buffers.record_batch(compression)
            with _SummedFile(folder / file, there) as sink:
                _write_arrow(sink, batch, compression, block_rows.get(compression, batch.num_rows))
            files[-1] = PartFile(file, sink.num_bytes, sink.checksum.hex())
    except BaseException:
        for each in files:
            (folder / each.name).unlink(missing_ok=True)
        raise
    return Part(name, buffers.num_rows, tuple(files), buffers.num_values(), buffers.packed_rows())


def _there(buffers: PartBuffers) -> list[Streamed]:
    """Return the columns that are in the file where Arrow will put them; if one is not, all are taken back."""
    due = places(buffers.stored, buffers.num_rows) if buffers.streamed else {}
    if any(due[name] != each.place for name, each in buffers.streamed.items()):
        buffers.take_back()
    return list(buffers.streamed.values())


def codec(compression: str) -> pa.Codec | None:
    """Return what compresses; its level is part of the format, so that the same input gives the same bytes."""
    if compression == "none":
        return None
    return pa.Codec("zstd", compression_level=ZSTD_LEVEL) if compression == "zstd" else pa.Codec("lz4")


def _write_arrow(sink: "_Counted", batch: pa.RecordBatch, compression: str, block_rows: int) -> None:
    schema = batch.schema
    if compression == "none":
        schema = schema.with_metadata(_padding(schema))
        batch = pa.RecordBatch.from_arrays(batch.columns, schema=schema)
    options = pa.ipc.IpcWriteOptions(compression=codec(compression), use_threads=False)
    with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), schema, options=options) as writer:
        for begin in range(0, batch.num_rows, block_rows):
            writer.write_batch(batch.slice(begin, block_rows))


@cache
def _padding(schema: pa.Schema) -> dict[str, str]:
    """Return the metadata with which the body of a record batch of `schema` begins at a multiple of 64 bytes."""
    first = schema.field(0).type
    if pa.types.is_large_list(first) or pa.types.is_large_binary(first) or pa.types.is_large_string(first):
        return {}  # nothing to align
    for count in range(0, 2 * ALIGNMENT, 8):
        metadata = {"pad": "-" * count}
        padded = schema.with_metadata(metadata)
        row = pa.RecordBatch.from_arrays([_one_row(field.type) for field in schema], schema=padded)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, padded) as writer:
            writer.write_batch(row)
        written = sink.getvalue()
        body = pa.ipc.open_file(written).get_batch(0).column(0).buffers()[-1]
        if (body.address - written.address) % ALIGNMENT == 0:
            return metadata
    raise AssertionError("no padding aligns this schema")


def _one_row(kind: pa.DataType) -> pa.Array:
    """Return an array of one row of zeros; from buffers, as pa.array would import pandas where that is installed."""
    zeros, offsets = pa.py_buffer(bytes(8)), pa.py_buffer(bytes(16))
    if pa.types.is_fixed_size_list(kind):
        whole = pa.py_buffer(bytes(8 * kind.list_size))
        child = pa.Array.from_buffers(kind.value_type, kind.list_size, [None, whole])
        return pa.Array.from_buffers(kind, 1, [None], children=[child])
    if pa.types.is_primitive(kind):
        return pa.Array.from_buffers(kind, 1, [None, zeros])
    if pa.types.is_large_list(kind):
        child = pa.Array.from_buffers(kind.value_type, 0, [None, zeros])
        return pa.Array.from_buffers(kind, 1, [None, offsets], children=[child])
    return pa.Array.from_buffers(kind, 1, [None, offsets, zeros])


class _Counted:
    """A file that Arrow writes to; all it keeps is how long it is, and where each buffer begins."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.closed = False
        self.places: dict[int, int] = {}
        """By the buffers' addresses."""

    def write(self, content: Any) -> int:
        """Take what Arrow gives: a buffer, or bytes that go between buffers."""
        if isinstance(content, pa.Buffer):
            self.places[content.address] = self.num_bytes
        self.num_bytes += len(content)
        return len(content)

    def tell(self) -> int:
        """Return how many bytes there are."""
        return self.num_bytes

    def flush(self) -> None:
        """Do nothing: what was written is written."""

    def close(self) -> None:
        """Do nothing: whoever opened it closes it."""


class _SummedFile(_Counted):
    """A file on the disk that knows its checksum; columns that are in it already are stepped over."""

    def __init__(self, path: Path, there: Iterable[Streamed]) -> None:
        super().__init__()
        self.checksum = Checksum()
        self._there = {each.place: each for each in there if each.num_bytes}
        begin = 0 if self._there else os.O_TRUNC
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | begin, 0o644)
        self._summer = ThreadPoolExecutor(1)

    def __enter__(self) -> "_SummedFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True
        self._summer.shutdown()
        os.close(self._handle)
        assert error[0] or not self._there, "Arrow has not come by every column that is in the file"

    def write(self, content: Any) -> int:
        """Write and sum up what Arrow gives."""
        whole = memoryview(content).cast("B")
        there = self._there.pop(self.num_bytes, None) if len(whole) else None
        if there is not None:
            assert there.num_bytes == len(whole), "Arrow pads a column otherwise than it was padded"
            self.checksum.join(there.checksum, len(whole))
        else:
            self._write(whole)
        return super().write(content)

    def _write(self, whole: memoryview) -> None:
        # Both run without Python's lock, at about the same speed.
        summed = self._summer.submit(self.checksum.update, whole) if len(whole) >= _LARGE_BYTES else None
        try:
            write_at(self._handle, whole, self.num_bytes)
        finally:
            summed.result() if summed else self.checksum.update(whole)

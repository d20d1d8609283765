"""The buffers of Arrow's columns as NumPy arrays, without a copy; what does not fit the schema is refused.

Of uncompressed parts this is for those that arrow_file.py does not know, most of which are damaged.
"""

import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.data.pack.arrow_file import Buffers
from shoal.data.pack.schema import Stored


def open_arrow(mapped: mmap.mmap, name: str, only_field: int | None = None) -> Any:
    """Return Arrow's reader of the file that `mapped` holds; of one field only, if asked."""
    # Threads of Arrow's own would fight with those that call.
    options = pa.ipc.IpcReadOptions(use_threads=False, included_fields=None if only_field is None else [only_field])
    try:
        return pa.ipc.open_file(pa.py_buffer(mapped), options=options)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name} is not an Arrow file: {error}.") from None


def only_batch(mapped: mmap.mmap, stored: Sequence[Stored], num_rows: int, name: str) -> dict[str, Buffers]:
    """Return views of the buffers of all columns of a file, which holds them in one record batch of `num_rows`."""
    reader = open_arrow(mapped, name)
    check_schema(reader.schema, stored, name)
    batch = get_batch(reader, 0, name) if reader.num_record_batches == 1 else None
    if batch is None or batch.num_rows != num_rows:
        found = "not one record batch" if batch is None else f"{batch.num_rows:,} rows"
        raise DataError(f"{name} has {found}, but the manifest says {num_rows:,} rows in one.")
    return {
        each.name: buffers_of(batch.column(i), each, f"{name}, column {each.name!r}") for i, each in enumerate(stored)
    }


def get_batch(reader: Any, number: int, name: str) -> Any:
    """Return a record batch, decompressed."""
    try:
        return reader.get_batch(number)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{name}: block {number} is damaged ({error}).") from None


def check_schema(schema: pa.Schema, stored: Sequence[Stored], name: str) -> None:
    """Raise unless a file has exactly the columns that the manifest says."""
    wanted = pa.schema([each.arrow_field for each in stored])
    if not schema.equals(wanted, check_metadata=False):
        raise DataError(f"{name} has the columns {_listed(schema)}, but the manifest says {_listed(wanted)}.")


def _listed(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema) or "none"


def buffers_of(array: Any, stored: Stored, name: str) -> Buffers:
    """Return views of an Arrow array's buffers. `name` is where it is from, for what is wrong with it."""
    buffers, rows = array.buffers(), len(array)
    if array.null_count or any(buffer is not None for buffer in buffers[: 1 if not stored.is_fixed else -1]):
        raise DataError(f"{name} has missing values. Pack the source again.")
    data = buffers[-1] if buffers[-1] is not None else pa.py_buffer(b"")
    if stored.is_fixed:
        values = _view(data, stored.dtype, rows * stored.row_elements, name)
        return Buffers(values.reshape(rows, *stored.shape), None)
    offsets = _view(buffers[1], np.dtype(np.int64), rows + 1, name)
    first, last = int(offsets[0]), int(offsets[-1])
    room = data.size // stored.dtype.itemsize
    if not 0 <= first <= last <= room:
        raise DataError(f"{name} has offsets from {first:,} to {last:,}, beyond its {room:,} elements.")
    return Buffers(_view(data, stored.dtype, last, name), offsets)


def _view(buffer: pa.Buffer, dtype: np.dtype[Any], count: int, name: str) -> NDArray[Any]:
    if buffer.size < count * dtype.itemsize:
        raise DataError(f"{name} holds {buffer.size:,} bytes, but its rows need {count * dtype.itemsize:,}.")
    return np.frombuffer(buffer, dtype=dtype, count=count)

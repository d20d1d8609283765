"""Rows that a format gives by ranges: as whole batches for the writer, or one by one.

1. A range of rows is loaded at once: a column is an array, values end to end (`Flat`), or a list.
2. `as_batches` hands these on; `as_samples` cuts them into rows.
3. When a range cannot be loaded, `as_samples` loads its rows alone, so that only the bad ones are errors.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column, Flat
from shoal.data.sources.source import Batch, Sample, Slice, Values, batch_rows

Load = Callable[[int, int], Mapping[str, Values]]
"""Return the columns of rows [begin, end), or raise a DataError that names file and rows."""
Label = Callable[[int], str]


def as_batches(part: Slice, load: Load, label: Label, *, row_bytes: float, multiple: int = 1) -> Iterator[Batch]:
    """Yield the rows of a slice in batches of about BATCH_BYTES."""
    for begin, end in batch_rows(part, row_bytes, multiple):
        yield end - begin, _shifted(label, begin), load(begin, end)


def as_samples(
    part: Slice, load: Load, label: Label, columns: tuple[Column, ...], *, row_bytes: float, multiple: int = 1
) -> Iterator[Sample]:
    """Yield the rows of a slice one by one; a row that cannot be loaded comes as its error."""
    for begin, end in batch_rows(part, row_bytes, multiple):
        try:
            batch = load(begin, end)
        except DataError:
            yield from _alone(begin, end, load, label, columns)
        else:
            yield from rows_of((end - begin, _shifted(label, begin), batch), columns)


def rows_of(batch: Batch, columns: tuple[Column, ...]) -> Iterator[Sample]:
    """Yield the samples of a batch."""
    num_rows, label, values = batch
    cuts = {column.name: _cutter(values[column.name], column.kind) for column in columns}
    for row in range(num_rows):
        yield label(row), {name: cut(row) for name, cut in cuts.items()}


def array_column(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Column:
    """Return the column of an array whose rows have `dtype` and `shape`; text for str, bytes for bytes."""
    if dtype.kind in "US" and not shape:
        return Column(name, "text" if dtype.kind == "U" else "bytes")
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise ConfigError(
            f"Column {name!r} is of type {dtype}, which no tensor has. Convert it, or leave it out with columns=[...]."
        )
    return Column(name, "array" if shape else "scalar", dtype.newbyteorder("=").name, shape)


def in_memory(values: NDArray[Any]) -> Values:
    """Return an array as a batch holds it: native byte order, contiguous; text and bytes as a list."""
    if values.dtype.kind in "US":
        return values.tolist()  # type: ignore[no-any-return]
    return np.ascontiguousarray(values, dtype=values.dtype.newbyteorder("="))


def row_bytes_of(columns: tuple[Column, ...]) -> int:
    """Return about how many bytes a row has; what varies counts as 64."""
    fixed = [column for column in columns if column.kind in ("scalar", "array")]
    return sum(np.dtype(column.dtype).itemsize * int(np.prod(column.shape)) for column in fixed) + 64 * (
        len(columns) - len(fixed)
    )


def chosen(names: Mapping[str, Any], wanted: tuple[str, ...] | None, where: str) -> list[str]:
    """Return the columns to read: those asked for, else all; a name that is not there is an error."""
    for name in wanted or ():
        if name not in names:
            raise ConfigError(f"{where} has no column {name!r}. It has: {', '.join(names)}.")
    return list(wanted) if wanted else list(names)


def _alone(begin: int, end: int, load: Load, label: Label, columns: tuple[Column, ...]) -> Iterator[Sample]:
    for row in range(begin, end):
        try:
            yield from rows_of((1, _shifted(label, row), load(row, row + 1)), columns)
        except DataError as error:
            yield label(row), error


def _shifted(label: Label, begin: int) -> Label:
    return lambda row: label(begin + row)


def _cutter(values: Values, kind: str) -> Callable[[int], Any]:
    if not isinstance(values, Flat):
        return values.__getitem__
    flat, offsets = values.values, values.offsets.tolist()
    if kind == "text":
        return lambda row: flat[offsets[row] : offsets[row + 1]].tobytes().decode()
    if kind in ("bytes", "image"):
        return lambda row: flat[offsets[row] : offsets[row + 1]].tobytes()
    return lambda row: flat[offsets[row] : offsets[row + 1]]

"""CSV, Parquet and Arrow files, read by pyarrow, file after file.

1. A slice is some row groups of a Parquet file, some record batches of an Arrow file, or a whole CSV file (where a row
   begins in the middle of one cannot be known).
2. Columns and their types are those of the first file; `year=2024/` in a name is a column, as Hive writes it.
3. What pyarrow reads comes in batches of about BATCH_BYTES; they become a pack's columns in arrow_values.py.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column
from shoal.data.sources.arrow_values import Shapes, columns_of, values_of
from shoal.data.sources.rows import chosen, rows_of
from shoal.data.sources.source import Batch, Sample, Slice, one_line
from shoal.data.sources.table_formats import Piece, RowLabel, format_of, kind_of
from shoal.data.sources.tree import Tree, described


class TableSource:
    """The rows of tables, file after file."""

    def __init__(
        self,
        tree: Tree,
        names: list[str],
        *,
        columns: tuple[str, ...] | list[str] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """`shapes` gives the shape of columns that are lists of one length: {"embedding": (768,)}."""
        self.tree, self.names, self._shapes = tree, tuple(names), dict(shapes or {})
        self._partitions = _partitions(self.names)
        with self.tree.open(self.names[0]) as file:
            schema = _guarded(self.names[0], lambda: format_of(self.names[0]).schema(file, self.names[0]))
        self._types = _guarded(self.names[0], lambda: {field.name: field.type for field in schema})
        fields = [pa.field(name, pa.array(values).type) for name, values in self._partitions.items()]
        every = pa.schema([*schema, *fields], metadata=schema.metadata)
        known = dict.fromkeys([*every.names, *self._shapes])
        wanted = chosen(known, tuple(columns) if columns else None, self.names[0])
        self._columns: tuple[Column, ...] = _guarded(
            self.names[0], lambda: columns_of(every, self._shapes, tuple(wanted) if columns else None)
        )
        roots = {column.name.partition(".")[0] for column in self._columns} | {column.name for column in self._columns}
        self._read_names = [name for name in schema.names if name in roots]

    @property
    def columns(self) -> tuple[Column, ...]:
        """What the tables hold."""
        return self._columns

    def describe(self) -> dict[str, Any]:
        """Return the kind, the files' names and sizes."""
        return described(
            kind_of(self.names[0]), self.tree, self.names, columns=[column.name for column in self._columns]
        )

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return row groups, record batches or files."""
        found = []
        for name in self.names:
            with self.tree.open(name) as file:
                pieces = _guarded(name, lambda: format_of(name).pieces(file, self.tree.size(name)))  # noqa: B023  called here
            found += _grouped(name, pieces, about_bytes)
        return found

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the rows of a slice; rows that cannot be read come as their error."""
        errors: list[Sample] = []
        for batch, label in self._tables(part, errors):
            yield from self._rows(batch, label)
            yield from errors
            errors.clear()
        yield from errors

    def read_batches(self, part: Slice) -> Iterator[Batch]:
        """Yield the rows of a slice, many at a time."""
        for batch, label in self._tables(part, None):
            yield batch.num_rows, label, values_of(batch, self._columns, label)

    def fingerprint(self, part: Slice) -> str:
        """Return size and time of the file."""
        return self.tree.stamp(part.items[0])

    def _rows(self, batch: pa.RecordBatch, label: "RowLabel") -> Iterator[Sample]:
        try:
            values = values_of(batch, self._columns, label)
        except DataError:
            if batch.num_rows == 1:
                raise
            for row in range(batch.num_rows):  # one is bad: the others are read all the same
                try:
                    yield from self._rows(batch.slice(row, 1), RowLabel(label.prefix, label.begin + row))
                except DataError as error:
                    yield label(row), error
        else:
            yield from rows_of((batch.num_rows, label, values), self._columns)

    def _tables(self, part: Slice, errors: list[Sample] | None) -> Iterator[tuple[pa.RecordBatch, "RowLabel"]]:
        name, form = part.items[0], format_of(part.items[0])
        with self.tree.open(name) as file:
            batches = form.batches(file, part, self._read_names, self._types, errors)
            while (found := _guarded(name, lambda: next(batches, None))) is not None:
                batch, label = found
                yield self._with_partitions(name, batch), label

    def _with_partitions(self, name: str, batch: pa.RecordBatch) -> pa.RecordBatch:
        for column, values in self._partitions.items():
            value = values[self.names.index(name)]
            batch = batch.append_column(column, pa.array([value] * batch.num_rows))
        return batch


def _grouped(name: str, pieces: list[Piece], about_bytes: int) -> list[Slice]:
    found, begin, total = [], 0, 0
    for number, (_, num_bytes) in enumerate(pieces, start=1):
        total += num_bytes
        if total >= about_bytes or number == len(pieces):
            rows = [count for count, _ in pieces[begin:number]]
            found.append(Slice((name,), begin, number, total, sum(rows) if all(rows) else None))
            begin, total = number, 0
    return found


def _partitions(names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Return the values of Hive's `key=value/` folders for each file; numbers where all are."""
    keys = [dict(part.split("=", 1) for part in name.split("/")[:-1] if "=" in part) for name in names]
    found: dict[str, list[Any]] = {key: [values.get(key) for values in keys] for key in keys[0]}
    if any(values.keys() != keys[0].keys() for values in keys):
        raise ConfigError(
            f"The folders of {names[0]} name other columns than those of other files. Pack them one by one."
        )
    return {
        key: [int(x) for x in values] if all(x.isdigit() for x in values) else values for key, values in found.items()
    }


def _guarded(name: str, call: Any) -> Any:
    try:
        return call()
    except (pa.ArrowException, OSError, KeyError, ValueError) as error:  # the last: names that are not UTF-8
        raise DataError(f"{name} cannot be read: {one_line(error)}.") from error

"""How pyarrow reads a Parquet, an Arrow or a CSV file in pieces that can be read by themselves."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import pyarrow as pa

from shoal.core.errors import DataError
from shoal.data.sources.source import BATCH_BYTES, Sample, Slice

TABLE_EXTENSIONS = {
    ".parquet": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}
_DELIMITERS = {".tsv": "\t"}


class RowLabel:
    """Names rows: "t.parquet: row 7"."""

    def __init__(self, prefix: str, begin: int) -> None:
        self.prefix, self.begin = prefix, begin

    def __call__(self, row: int) -> str:
        """Return the name of a row."""
        return f"{self.prefix} {self.begin + row}"


Piece = tuple[int, int]
"""Rows (0 where that is not known) and bytes of what can be read by itself."""
Tables = Iterator[tuple[pa.RecordBatch, RowLabel]]


class _Parquet:
    @staticmethod
    def schema(file: BinaryIO, name: str) -> pa.Schema:
        del name
        return pa.parquet.ParquetFile(file).schema_arrow

    @staticmethod
    def pieces(file: BinaryIO, num_bytes: int) -> list[Piece]:
        del num_bytes
        groups = _groups(pa.parquet.ParquetFile(file))
        return [(group.num_rows, group.total_byte_size) for group in groups]

    @staticmethod
    def batches(file: BinaryIO, part: Slice, names: list[str], types: Any, errors: list[Sample] | None) -> Tables:
        del types, errors
        opened = pa.parquet.ParquetFile(file)
        groups = _groups(opened)
        row = sum(group.num_rows for group in groups[: part.begin])
        for number in range(part.begin, part.end):
            rows = _rows_a_batch(groups[number].total_byte_size, groups[number].num_rows)
            for batch in opened.iter_batches(rows, row_groups=[number], columns=names, use_threads=False):
                yield batch, RowLabel(f"{part.items[0]}: row", row)
                row += batch.num_rows


class _Arrow:
    @staticmethod
    def schema(file: BinaryIO, name: str) -> pa.Schema:
        del name
        return _opened(file).schema

    @staticmethod
    def pieces(file: BinaryIO, num_bytes: int) -> list[Piece]:
        opened = _opened(file)
        count = opened.num_record_batches if isinstance(opened, pa.ipc.RecordBatchFileReader) else 1
        return [(0, num_bytes // max(count, 1))] * count

    @staticmethod
    def batches(file: BinaryIO, part: Slice, names: list[str], types: Any, errors: list[Sample] | None) -> Tables:
        del types, errors
        opened = _opened(file)
        whole = opened if not isinstance(opened, pa.ipc.RecordBatchFileReader) else None
        found = enumerate(whole) if whole else ((at, opened.get_batch(at)) for at in range(part.begin, part.end))
        for number, batch in found:
            rows = _rows_a_batch(batch.nbytes, batch.num_rows)
            for begin in range(0, batch.num_rows, rows):
                yield (
                    batch.slice(begin, rows).select(names),
                    RowLabel(f"{part.items[0]}: record batch {number}, row", begin),
                )


class _Csv:
    @staticmethod
    def schema(file: BinaryIO, name: str) -> pa.Schema:
        with pa.csv.open_csv(file, parse_options=_csv_options(name, lambda bad: "skip")) as opened:  # noqa: ARG005
            return opened.schema

    @staticmethod
    def pieces(file: BinaryIO, num_bytes: int) -> list[Piece]:
        del file
        return [(0, num_bytes)]

    @staticmethod
    def batches(file: BinaryIO, part: Slice, names: list[str], types: Any, errors: list[Sample] | None) -> Tables:
        name, row = part.items[0], 0

        def refused(bad: Any) -> str:
            if errors is None:
                return "error"
            label = f"{name}: line {bad.number}"
            errors.append((label, DataError(f"{label} has {bad.actual_columns} values, not {bad.expected_columns}.")))
            return "skip"

        with pa.csv.open_csv(
            file,
            read_options=pa.csv.ReadOptions(use_threads=False),  # errors then say which row
            parse_options=_csv_options(name, refused),
            convert_options=pa.csv.ConvertOptions(column_types=types, include_columns=names),
        ) as opened:
            for batch in opened:
                yield batch, RowLabel(f"{name}: row", row)
                row += batch.num_rows


_FORMATS = {"parquet": _Parquet, "arrow": _Arrow, "csv": _Csv}


def _csv_options(name: str, refused: Any = None) -> Any:
    delimiter = _DELIMITERS.get(PurePosixPath(name).suffix.lower(), ",")
    return pa.csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=refused)


def _opened(file: BinaryIO) -> Any:
    try:
        return pa.ipc.open_file(file)
    except pa.ArrowInvalid:
        file.seek(0)
        return pa.ipc.open_stream(file)


def _groups(opened: Any) -> list[Any]:
    return [opened.metadata.row_group(number) for number in range(opened.metadata.num_row_groups)]


def _rows_a_batch(num_bytes: int, num_rows: int) -> int:
    return max(1, int(BATCH_BYTES // max(num_bytes / max(num_rows, 1), 1)))


def kind_of(name: str) -> str:
    """Return the kind of a table by its file's name."""
    return TABLE_EXTENSIONS.get(PurePosixPath(name).suffix.lower(), "parquet")


def format_of(name: str) -> Any:
    """Return what reads a table of this name: `schema`, `pieces`, `batches`."""
    kind = kind_of(name)
    if kind in ("parquet", "csv"):
        import_module(f"pyarrow.{kind}")  # 0.1 s that a pack of anything else need not take
    return _FORMATS[kind]

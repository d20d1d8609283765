"""Hugging Face datasets: a folder that `save_to_disk` wrote, or a Dataset object. Images stay encoded.

Example: `open_source(load_dataset("mnist", split="train"))` has the columns `image` (PNG bytes) and `label`, whose
`extra["classes"]` are "0" to "9".
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column
from shoal.data.sources.arrow_values import Shapes, columns_of, features_of, values_of
from shoal.data.sources.rows import as_batches, as_samples, chosen
from shoal.data.sources.source import Batch, Sample, Slice, Values, cut_rows, library, one_line
from shoal.data.sources.tree import LocalTree, UrlTree


class HuggingFaceSource:
    """The rows of a dataset of the `datasets` library."""

    def __init__(
        self,
        dataset: Any,
        *,
        split: str | None = None,
        columns: tuple[str, ...] | list[str] | None = None,
        shapes: Shapes | None = None,
    ) -> None:
        """`dataset` is a Dataset, or the tree of a saved one; `split` names one of several."""
        self._tree: Any = dataset if isinstance(dataset, (LocalTree, UrlTree)) else None
        self._split = split
        self._opened: Any = None if self._tree else _one_split(dataset, split)
        self._wanted = tuple(columns) if columns else None
        found = self._dataset()
        schema = found.features.arrow_schema
        chosen(dict.fromkeys(schema.names), self._wanted, "The dataset")
        self._shapes = _shapes_of(schema) | dict(shapes or {})
        self._columns = columns_of(schema, self._shapes, self._wanted)
        self._row_bytes = max(1.0, found.data.nbytes / max(len(found.data), 1))
        self._num_rows = len(found)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | ({"_opened": None} if self._tree else {})

    @property
    def columns(self) -> tuple[Column, ...]:
        """What the dataset's features say."""
        return self._columns

    def describe(self) -> dict[str, Any]:
        """Return the dataset's own name, its split and size."""
        info = self._dataset().info
        name = self._tree.name if self._tree else info.dataset_name or info.builder_name or "dataset"
        found = {"kind": "huggingface", "name": name, "split": str(self._dataset().split or "")}
        return {**found, "num_rows": self._num_rows, "columns": [column.name for column in self._columns]}

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return ranges of rows."""
        return cut_rows(self._num_rows, self._row_bytes, about_bytes)

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the rows of a range."""
        yield from as_samples(part, self._load, _label, self._columns, row_bytes=self._row_bytes)

    def read_batches(self, part: Slice) -> Iterator[Batch]:
        """Yield the rows of a range, many at a time."""
        yield from as_batches(part, self._load, _label, row_bytes=self._row_bytes)

    def fingerprint(self, part: Slice) -> str:
        """Return the sizes and times of the dataset's files, and its own fingerprint."""
        del part
        if self._tree:
            return ";".join(self._tree.stamp(name) for name in self._tree.sizes())
        files = [
            LocalTree(Path(file["filename"]).parent).stamp(Path(file["filename"]).name)
            for file in self._opened.cache_files
        ]
        return ";".join([str(getattr(self._opened, "_fingerprint", "")), *files])

    def _dataset(self) -> Any:
        if self._opened is None:
            datasets = library("datasets", extra="hf", what="a saved Hugging Face dataset")
            try:
                self._opened = _one_split(datasets.load_from_disk(self._tree.path("")), self._split)
            except ConfigError:
                raise
            except Exception as error:  # the library raises whatever its readers do
                raise DataError(f"{self._tree.name} is not a whole saved dataset: {one_line(error)}.") from error
        return self._opened

    def _load(self, begin: int, end: int) -> dict[str, Values]:
        try:
            table = self._dataset().with_format("arrow")[begin:end]
            table.validate(full=True)
            batch = table.select(_roots(self._columns, table.schema.names)).combine_chunks()
        except Exception as error:  # the library raises whatever its readers do
            raise DataError(f"row {begin} cannot be read: {one_line(error)}.") from error
        return values_of(self._with_files(batch, begin), self._columns, lambda row: _label(begin + row))

    def _with_files(self, table: pa.Table, begin: int) -> pa.Table:
        """Return the table with the bytes of images that it names only by path."""
        import pyarrow.compute  # 60 ms that a pack of anything else need not take

        for column in self._columns:
            at = table.schema.get_field_index(column.name)
            if column.kind not in ("image", "bytes") or not pa.types.is_struct(table.schema.field(at).type):
                continue
            rows = table.column(at)
            if pyarrow.compute.struct_field(rows, "bytes").null_count:
                files = [_with_bytes(row, _label(begin + number)) for number, row in enumerate(rows.to_pylist())]
                table = table.set_column(at, column.name, pa.array(files, pa.struct([("bytes", pa.large_binary())])))
        return table


def _label(row: int) -> str:
    return f"row {row}"


def _with_bytes(file: dict[str, Any] | None, label: str) -> dict[str, Any] | None:
    if file is None or file["bytes"] is not None:
        return file and {"bytes": file["bytes"]}
    try:
        return {"bytes": Path(file["path"]).read_bytes()}
    except (OSError, TypeError) as error:
        raise DataError(
            f"{label}: its file {Path(str(file['path'])).name} cannot be read: {one_line(error)}."
        ) from None


def _one_split(dataset: Any, split: str | None) -> Any:
    if not isinstance(dataset, dict):
        return dataset
    if split not in dataset:
        raise ConfigError(
            f"The dataset has the splits {', '.join(dataset)}. Choose one with split='{next(iter(dataset))}'."
        )
    return dataset[split]


def _shapes_of(schema: pa.Schema) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the columns that are Array2D to Array5D, or a sequence of fixed length."""
    features = features_of(schema)
    shapes = {name: feature.get("shape") for name, feature in features.items() if isinstance(feature, dict)}
    return {name: tuple(shape) for name, shape in shapes.items() if shape and None not in shape}


def _roots(columns: tuple[Column, ...], names: list[str]) -> list[str]:
    wanted = {column.name for column in columns} | {column.name.partition(".")[0] for column in columns}
    return [name for name in names if name in wanted]

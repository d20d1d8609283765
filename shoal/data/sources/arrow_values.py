"""Arrow columns as a pack's columns: numbers as arrays, text, bytes and lists as values end to end.

| Arrow type | column |
|---|---|
| integers, floats, bool | scalar |
| dates, times | scalar int64 in the type's own unit, which `extra["arrow"]` names |
| fixed-size lists, tensors | array |
| lists of numbers | ragged; an array where `shapes` gives its shape |
| strings, binary, dictionaries of them | text, bytes |
| Hugging Face images (struct of bytes and path) | image |
| other structs | one column a field, `a.b` |
A value that is missing is an error that names its row.
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column, Flat
from shoal.data.sources.source import Values, one_line

Shapes = Mapping[str, tuple[int, ...]]


def columns_of(schema: pa.Schema, shapes: Shapes, wanted: tuple[str, ...] | None) -> tuple[Column, ...]:
    """Return the columns of a table; `shapes` says which lists are arrays, `wanted` which columns to read."""
    features = features_of(schema)
    return tuple(
        _column(field.name, field.type, shapes.get(field.name), features.get(field.name, {}))
        for field in _fields(schema, features)
        if wanted is None or field.name in wanted
    )


def features_of(schema: pa.Schema) -> dict[str, Any]:
    """Return what the `datasets` library noted about each column, by name."""
    try:
        noted = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        return dict(noted.get("info", {}).get("features", {}))
    except (ValueError, AttributeError, RecursionError) as error:
        raise DataError(f"what `datasets` noted about the columns is damaged: {one_line(error)}.") from error


def values_of(batch: pa.RecordBatch, columns: tuple[Column, ...], label: Callable[[int], str]) -> dict[str, Values]:
    """Return the values of each column; raise a DataError that names the first row where one is missing.

    What is damaged is found before it is read: Arrow itself takes offsets and text from a file as they are.
    """
    try:
        batch.validate(full=True)
        arrays = _arrays(batch, {column.name: column for column in columns})
        for column in columns:
            _refuse_nulls(column.name, arrays[column.name], label)
        return {column.name: _READERS[column.kind](arrays[column.name], column, label) for column in columns}
    except pa.ArrowException as error:
        which = label(0) if batch.num_rows == 1 else f"{label(0)}, or one of the {batch.num_rows - 1:,} after it"
        raise DataError(f"{which}: {one_line(error)}.") from error


def _fields(schema: pa.Schema, features: Mapping[str, Any]) -> list[pa.Field]:
    fields: list[pa.Field] = []
    for field in schema:
        if pa.types.is_struct(field.type) and not _is_file(features.get(field.name, {})):
            inner = pa.schema([part.with_name(f"{field.name}.{part.name}") for part in field.type])
            fields += _fields(inner, {})
        else:
            fields.append(field)
    return fields


def _is_file(feature: Any) -> bool:
    return isinstance(feature, dict) and feature.get("_type") in ("Image", "Audio")


def _column(name: str, kind: pa.DataType, shape: tuple[int, ...] | None, feature: Any) -> Column:
    if _is_file(feature):
        return Column(name, "image" if feature["_type"] == "Image" else "bytes")
    extra: dict[str, Any] = (
        {"classes": list(feature["names"])} if isinstance(feature, dict) and "names" in feature else {}
    )
    shape, element, ndim = _unwrapped(kind, shape)
    if pa.types.is_string(element) or pa.types.is_large_string(element) or pa.types.is_string_view(element):
        kinds, dtype = "text", "uint8"
    elif _is_binary(element):
        kinds, dtype = "bytes", "uint8"
    else:
        kinds, dtype = "array" if shape else "ragged" if ndim else "scalar", _dtype(name, element)
        if pa.types.is_temporal(element):
            extra["arrow"] = str(element)
    if kinds in ("text", "bytes") and (ndim or shape):
        raise ConfigError(
            f"Column {name!r} is a {kind}: lists of text have no place in a pack. Leave it out, or join them."
        )
    if kinds == "ragged":
        extra["ndim"] = ndim
    return Column(name, kinds, dtype, shape or (), extra=extra)


def _unwrapped(kind: pa.DataType, shape: tuple[int, ...] | None) -> tuple[tuple[int, ...] | None, pa.DataType, int]:
    """Return a row's shape where the type or `shape` gives one, the elements' type, and how deep lists are nested."""
    if isinstance(kind, pa.FixedShapeTensorType):
        return tuple(kind.shape), kind.value_type, 0
    if isinstance(kind, pa.BaseExtensionType):
        return _unwrapped(kind.storage_type, shape)
    sizes: list[int] | None = []
    ndim = 0
    while _is_list(kind):
        sizes = [*sizes, kind.list_size] if sizes is not None and pa.types.is_fixed_size_list(kind) else None
        kind, ndim = kind.value_type, ndim + 1
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if shape is not None:
        return tuple(shape), kind, 0
    return (tuple(sizes), kind, 0) if sizes else (None, kind, ndim)


def _dtype(name: str, element: pa.DataType) -> str:
    if pa.types.is_boolean(element):
        return "bool"
    if pa.types.is_temporal(element):
        return "int64"
    if pa.types.is_integer(element) or pa.types.is_floating(element):
        return str(np.dtype(element.to_pandas_dtype()).name)
    raise ConfigError(
        f"Column {name!r} is of type {element}, which no tensor has. Convert it, or leave it out with columns=[...]."
    )


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_binary(kind: pa.DataType) -> bool:
    tests = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view)
    return any(test(kind) for test in tests)


def _arrays(batch: pa.RecordBatch, columns: Mapping[str, Column]) -> dict[str, pa.Array]:
    """Return the batch's arrays by column, those in structs as `a.b`, and the bytes of files."""
    found = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()  # noqa: PLW2901
        found.update(_flattened(name, array, columns))
    return found


def _flattened(name: str, array: pa.Array, columns: Mapping[str, Column]) -> dict[str, pa.Array]:
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if not pa.types.is_struct(array.type):
        return {name: array}
    if name in columns:  # a file: what it holds
        return {name: array.flatten()[array.type.get_field_index("bytes")]}
    inner = zip(array.type, array.flatten(), strict=True)
    return {
        path: part for field, one in inner for path, part in _flattened(f"{name}.{field.name}", one, columns).items()
    }


def _refuse_nulls(name: str, array: pa.Array, label: Callable[[int], str]) -> None:
    if array.null_count:
        row = int(np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))[0])
        raise DataError(f"{label(row)}: column {name!r} is missing. Fill it in, or leave the column out.")


def _numbers(array: pa.Array, column: Column, label: Callable[[int], str]) -> NDArray[Any]:
    """Return the elements of an array without lists; `label` names its first row should one be missing."""
    if array.null_count:
        raise DataError(f"{label(0)}, or one soon after it: column {column.name!r} has a missing value in a list.")
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_temporal(array.type):
        array = array.cast(pa.int32()) if array.type.bit_width == 32 else array
        array = array.cast(pa.int64())
    return np.asarray(array.to_numpy(zero_copy_only=False))


def _scalar(array: pa.Array, column: Column, label: Callable[[int], str]) -> Values:
    return _numbers(array, column, label)


def _array(array: pa.Array, column: Column, label: Callable[[int], str]) -> Values:
    num_rows, flat = len(array), array
    if not pa.types.is_fixed_size_list(array.type):
        lengths = _lengths(array)
        wrong = np.flatnonzero(lengths != math.prod(column.shape))
        if len(wrong):
            raise DataError(
                f"{label(int(wrong[0]))}: column {column.name!r} has {lengths[wrong[0]]} elements, and the shape "
                f"{list(column.shape)} has {math.prod(column.shape)}."
            )
    while _is_list(flat.type):
        flat = flat.flatten()
    return _numbers(flat, column, label).reshape(num_rows, *column.shape)


def _lengths(array: pa.Array) -> NDArray[np.int64]:
    """Return how many elements each row has, all its lists together."""
    bounds = np.arange(len(array) + 1)
    while _is_list(array.type):
        offsets = _offsets(array)
        bounds = offsets[bounds] - offsets[0]
        array = array.flatten()
    return np.asarray(np.diff(bounds), np.int64)


def _offsets(array: pa.Array) -> NDArray[np.int64]:
    if pa.types.is_fixed_size_list(array.type):
        return np.asarray(np.arange(len(array) + 1) * array.type.list_size, np.int64)
    return np.asarray(array.offsets.to_numpy(), dtype=np.int64)


def _ragged(array: pa.Array, column: Column, label: Callable[[int], str]) -> Values:
    if column.ndim == 1:
        offsets = _offsets(array)
        return Flat(_numbers(array.flatten(), column, label), offsets - offsets[0])
    rows = []
    for row, nested in enumerate(array.to_pylist()):
        try:
            rows.append(np.asarray(nested, dtype=column.dtype))
        except (ValueError, TypeError):
            raise DataError(
                f"{label(row)}: column {column.name!r} has lists of different lengths or missing values."
            ) from None
    return rows


def _binary(array: pa.Array, column: Column, label: Callable[[int], str]) -> Values:
    del label
    array = array.cast(pa.large_string() if column.kind == "text" else pa.large_binary())
    _, offsets, data = array.buffers()
    bounds = np.frombuffer(offsets, np.int64)[array.offset : array.offset + len(array) + 1]
    return Flat(np.frombuffer(data or b"", np.uint8), bounds)


_READERS: dict[str, Callable[[pa.Array, Column, Callable[[int], str]], Values]] = {
    "scalar": _scalar,
    "array": _array,
    "ragged": _ragged,
    "text": _binary,
    "bytes": _binary,
    "image": _binary,
}

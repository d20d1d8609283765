"""Which columns samples have, seen from a few of them; and which a person asked for."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError, did_you_mean
from shoal.data.pack.schema import DTYPES, KINDS, Column

_MAGIC = (
    *(b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF87a", b"GIF89a", b"BM", b"II*\x00", b"MM\x00*"),
    *(b"P4", b"P5", b"P6", b"\x00\x00\x00\x0cjP  "),
)
_CHANGES = {
    ("array", "ragged"),
    ("array", "tokens"),
    ("ragged", "tokens"),
    ("tokens", "ragged"),
    ("bytes", "image"),
    ("image", "bytes"),
}
"""Kinds that hold the same values as another."""


def infer_columns(samples: Sequence[Mapping[str, Any]]) -> tuple[Column, ...]:
    """Return the columns that the first samples of a source have: of arrays, those that differ in shape are ragged."""
    first = samples[0]
    if not isinstance(first, Mapping) or not first:
        raise DataError(f"a sample is a mapping of column names to values, not {type(first).__name__} ({first!r:.60}).")
    for sample in samples:
        if sample.keys() != first.keys():
            odd = sorted(sample.keys() ^ first.keys())
            raise DataError(f"samples have different columns: {', '.join(map(str, odd))} is not in all of them.")
    return tuple(_infer(str(name), [sample[name] for sample in samples]) for name in first)


def _infer(name: str, values: list[Any]) -> Column:
    if all(isinstance(value, str) for value in values):
        return Column(name, "text")
    if all(isinstance(value, bytes | bytearray | memoryview) for value in values):
        images = sum(is_image(bytes(value[:16])) for value in values)
        return Column(name, "image" if 2 * images > len(values) else "bytes")  # a bad one among them is named later
    arrays = [as_array(value, name) for value in values]
    dtypes = {dtype_of(value, array) for value, array in zip(values, arrays, strict=True)}
    dtype = dtypes.pop() if len(dtypes) == 1 else np.result_type(*arrays).name
    if dtype not in DTYPES:
        raise DataError(f"column {name!r} has the dtype {dtype}, which a pack cannot hold. Known: {', '.join(DTYPES)}.")
    shapes = {array.shape for array in arrays}
    if len(shapes) == 1 and 0 not in arrays[0].shape:
        shape = shapes.pop()
        return Column(name, "array" if shape else "scalar", dtype, shape)
    dims = {array.ndim for array in arrays}
    if len(dims) > 1:
        raise DataError(
            f"column {name!r} has arrays of {sorted(dims)} dimensions. Give each as many, or their own column."
        )
    return Column(name, "ragged", dtype, extra={"ndim": dims.pop()})


def is_image(start: bytes) -> bool:
    """Return whether bytes that begin so are an encoded image."""
    is_boxed = start[4:8] == b"ftyp" or (start[:4] == b"RIFF" and start[8:12] == b"WEBP")  # the first: AVIF, HEIF
    return is_boxed or start.startswith(_MAGIC)


def as_array(value: Any, name: str) -> NDArray[Any]:
    """Return a number, a list, an array or a tensor as an array; a bfloat16 tensor's as uint16."""
    if value is None:
        raise DataError(f"column {name!r} has a missing value (None). A pack has a value in every row: fill it in.")
    if str(getattr(value, "dtype", "")) == "torch.bfloat16":
        import torch

        value = value.contiguous().view(torch.uint16)
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, RuntimeError) as error:
        raise DataError(f"column {name!r} has a value that is no array ({type(value).__name__}: {error}).") from None
    if array.dtype.kind not in "biuf":
        raise DataError(
            f"column {name!r} has a {type(value).__name__} of dtype {array.dtype}, which a pack cannot hold. "
            "Give numbers, arrays of numbers, bytes or str, each under its own name."
        )
    return array


def dtype_of(value: Any, array: NDArray[Any]) -> str:
    """Return the dtype that a value has in a pack; `array` is what `as_array` makes of it."""
    return "bfloat16" if str(getattr(value, "dtype", "")) == "torch.bfloat16" else array.dtype.name


def choose_columns(columns: Sequence[Column], asked: Sequence[str] | Mapping[str, str] | None) -> tuple[Column, ...]:
    """Return the columns that were asked for, by name, or with their kinds; all where nothing was asked."""
    if asked is None:
        return tuple(columns)
    kinds = dict(asked) if isinstance(asked, Mapping) else dict.fromkeys(asked, "")
    known = {column.name: column for column in columns}
    for name in kinds:
        if name not in known:
            raise DataError(f"the source has no column {name!r}.{did_you_mean(name, list(known))}")
    return tuple(_with_kind(known[name], kind) for name, kind in kinds.items())


def _with_kind(column: Column, kind: str) -> Column:
    if kind in ("", column.kind):
        return column
    if kind not in KINDS:
        raise DataError(f"column {column.name!r} cannot be {kind!r}.{did_you_mean(kind, list(KINDS))}")
    flat = column.ndim == 1 and "int" in column.dtype
    if (column.kind, kind) in _CHANGES and (kind != "tokens" or flat):
        ndim = {"ndim": column.ndim} if kind == "ragged" else {}
        return replace(column, kind=kind, shape=(), extra={**column.extra, **ndim})
    raise DataError(f"column {column.name!r} is {column.kind} ({column.dtype}), which cannot be stored as {kind}.")

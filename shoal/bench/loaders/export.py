"""A sample of a pack as plain files, from which every loader's own format is made.

1. The column decides over the kind: images, tokens, or the largest one with rows of one size.
2. Its first rows, up to so many bytes, are written as peers/sample.py reads them.
3. JPEGs that the pack has cut into segments get whole again: restart markers, which only shoal makes use of, would
   make the others slower.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import open_memmap

from shoal.bench.loaders.peers.task import Task
from shoal.core.errors import ConfigError, did_you_mean
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column
from shoal.native import jpeg

_KINDS = {"image": "images", "tokens": "tokens", "scalar": "rows", "array": "rows"}
_BATCH = {"images": 64, "tokens": 64, "rows": 1024}
_NO_RESTART = 32767
"""Blocks of 16 pixels: more than a photograph has, so no marker is ever written."""


def task_of(
    pack: Pack,
    *,
    column: str | None,
    batch_size: int | None,
    threads: int,
    window: int = 1025,
    size: int = 224,
    write_s: float = 60.0,
) -> Task:
    """Return what is asked of all loaders, by the pack's column `column` or the one that matters most."""
    chosen = _column(pack, column)
    kind = _KINDS[chosen.kind]
    return Task(
        kind=kind,
        batch_size=batch_size or _BATCH[kind],
        threads=threads,
        window=window,
        size=size,
        write_s=write_s,
        column=chosen.name,
        compression=chosen.compression,
    )


def _column(pack: Pack, name: str | None) -> Column:
    if name is not None and name not in pack.columns:
        raise ConfigError(f"{pack.path} has no column {name!r}.{did_you_mean(name, list(pack.columns))}")
    every = [column for column in pack.columns.values() if name in (None, column.name) and column.kind in _KINDS]
    if not every:
        there = ", ".join(f"{column.name} ({column.kind})" for column in pack.columns.values())
        raise ConfigError(f"images, tokens and rows of one size are compared; {pack.path} has {there}.")
    streams = [column for column in every if column.kind in ("image", "tokens")]
    return (streams or sorted(every, key=_row_bytes))[-1]


def _row_bytes(column: Column) -> int:
    return int(np.prod(column.shape, dtype=np.int64)) * _numpy_dtype(column).itemsize


def _numpy_dtype(column: Column) -> np.dtype[Any]:
    return np.dtype({"bfloat16": "uint16", "bool": "uint8"}.get(column.dtype, column.dtype))


def export_sample(pack: Pack, task: Task, folder: Path, *, most_bytes: int) -> int:
    """Write the column's first rows, about `most_bytes` of them, into `folder`; return the bytes written."""
    column = pack.columns[task.column]
    {"images": _images, "tokens": _tokens, "rows": _rows}[task.kind](pack, column, folder, most_bytes)
    return sum(file.stat().st_size for file in folder.iterdir())


def _images(pack: Pack, column: Column, folder: Path, most_bytes: int) -> None:
    is_cut = bool(column.extra.get("index"))
    ends = [0]
    with (folder / "images.bin").open("wb") as file:
        for image in _values(pack, column.name):
            data = jpeg.transcode(image, _NO_RESTART)[0] if is_cut else image
            file.write(data)
            ends.append(ends[-1] + len(data))
            if ends[-1] >= most_bytes:
                break
    np.save(folder / "offsets.npy", np.array(ends, dtype=np.int64))


def _tokens(pack: Pack, column: Column, folder: Path, most_bytes: int) -> None:
    dtype, written = _numpy_dtype(column), 0
    (folder / "dtype").write_text(dtype.name)
    with (folder / "tokens.bin").open("wb") as file:
        for tokens in _values(pack, column.name):
            data = tokens[: (most_bytes - written) // dtype.itemsize].tobytes()
            file.write(data)
            written += len(data)
            if written + dtype.itemsize > most_bytes:
                break


def _rows(pack: Pack, column: Column, folder: Path, most_bytes: int) -> None:
    dtype = _numpy_dtype(column)
    count = min(pack.num_rows, max(1, most_bytes // _row_bytes(column)))
    out = open_memmap(folder / "rows.npy", mode="w+", dtype=dtype, shape=(count, *column.shape))
    if column.compression == "none":
        for part, first in enumerate(pack.manifest.first_rows[:-1]):
            if first < count:
                values = pack.values(part, column.name)[: count - first]
                out[first : first + len(values)] = values.view(dtype) if values.dtype != dtype else values
    else:
        for row, value in zip(range(count), _values(pack, column.name), strict=False):
            out[row] = value
    out.flush()


def _values(pack: Pack, column: str) -> Iterator[Any]:
    """Yield a column's values from the first row on."""
    only = Pack(pack.path, columns=[column])
    for row in range(only.num_rows):
        yield only[row][column]

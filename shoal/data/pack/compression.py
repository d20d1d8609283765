"""Which compression loads a column fastest, by measurement.

1. Take a sample of the column's rows, cut into blocks as a part will have them, and compress these with lz4 and zstd.
2. Measure how fast one core decompresses them, and know how fast the storage is read.
3. A byte of the column then takes 1 / storage without compression, and smaller / storage + 1 / decompression with it.
   Compress if that is faster by a third at least: what is compressed cannot be mapped, and is decompressed again in
   every epoch, while what is not compressed comes from the page cache if it fits there.

Example: text that zstd makes 3.0 times smaller and decompresses at 1.2 GB/s. From storage of 150 MB/s it arrives at
327 MB/s instead of 150: compress. From storage of 2 GB/s at 1.0 GB/s instead of 2: do not.

Columns that take under 5% of a row are left as they are: they would not be missed. So are tokens, whose windows are
gathered from the map.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.units import format_bytes
from shoal.data.pack.encode import Block
from shoal.data.pack.part_file import codec
from shoal.data.pack.schema import COMPRESSIONS, Column, Flat

BLOCK_BYTES = 256 << 10
"""Of the widest column that is compressed: large enough for zstd, small enough to be thrown away for one row."""
_WORTH = 4 / 3
_LEAST_SHARE = 0.05
_MEASURE_S = 0.03
_SAMPLE_BYTES = 4 << 20

Asked = str | Mapping[str, str]


@dataclass(frozen=True)
class Trial:
    """What a compression does to a sample of a column."""

    compression: str
    smaller: float
    """Compressed bytes over bytes."""
    decode_bytes_per_s: float
    """Of decompressed bytes, by one core."""

    def load_bytes_per_s(self, storage_bytes_per_s: float) -> float:
        """Return how many decompressed bytes arrive in a second."""
        return 1 / (self.smaller / storage_bytes_per_s + 1 / self.decode_bytes_per_s)


@dataclass(frozen=True)
class Choice:
    """What a column is stored with, and why: "none: it is 0.2% of a row"."""

    column: Column
    why: str


def check_asked(asked: Asked, columns: Sequence[Column]) -> None:
    """Raise what was asked for and is not there."""
    names = [column.name for column in columns]
    for name, word in asked.items() if isinstance(asked, Mapping) else [("", asked)]:
        if name and name not in names:
            raise ConfigError(f"compression for a column {name!r}, which is not there.{did_you_mean(name, names)}")
        if word not in (*COMPRESSIONS, "auto"):
            raise ConfigError(f"compression {word!r} is none.{did_you_mean(word, [*COMPRESSIONS, 'auto'])}")


def choose(
    columns: Sequence[Column], asked: Asked, block: Block, storage_bytes_per_s: float | None
) -> tuple[Choice, ...]:
    """Return each column's choice. `block` is a sample of rows; the storage's speed is needed for "auto" only."""
    check_asked(asked, columns)
    sizes = {column.name: column_bytes(block, column) for column in columns}
    whole = max(1, sum(sizes.values()))
    choices = []
    for column in columns:
        word = asked.get(column.name, "auto") if isinstance(asked, Mapping) else asked
        by_name = isinstance(asked, Mapping) and column.name in asked
        if word == "auto":
            assert storage_bytes_per_s is not None
            choices.append(_measured(column, block, sizes[column.name] / whole, storage_bytes_per_s))
        elif word != "none" and not by_name and column.kind in ("image", "tokens"):
            choices.append(
                Choice(column, f"none: {_LEFT_ALONE[column.kind]}; to do it all the same, ask for it by name")
            )
        else:
            choices.append(Choice(replace(column, compression=word), f"{word}, as asked"))
    return tuple(choices)


_LEFT_ALONE = {"image": "images are compressed already", "tokens": "windows of tokens are gathered from the map"}


def block_rows(columns: Sequence[Column], block: Block) -> dict[str, int]:
    """Return, for each compression in use, how many rows to compress together."""
    found: dict[str, int] = {}
    for column in columns:
        if column.compression != "none":
            row_bytes = max(1, column_bytes(block, column) // max(1, block.num_rows))
            rows = max(1, BLOCK_BYTES // row_bytes)
            found[column.compression] = min(rows, found.get(column.compression, rows))
    return found


def column_bytes(block: Block, column: Column) -> int:
    """Return the bytes that the values of a column take."""
    held = block.held[column.name]
    return int(held.values.nbytes if isinstance(held, Flat) else held.nbytes)


def _measured(column: Column, block: Block, share: float, storage_bytes_per_s: float) -> Choice:
    if column.kind == "tokens":
        return Choice(column, f"none: {_LEFT_ALONE['tokens']}")
    if share < _LEAST_SHARE:
        return Choice(column, f"none: it is {share:.1%} of a row")
    trials = [_try(word, _pieces(column, block)) for word in ("lz4", "zstd")]
    best = max(trials, key=lambda trial: trial.load_bytes_per_s(storage_bytes_per_s))
    tried = ", ".join(
        f"{trial.compression} {1 / trial.smaller:.3g}x smaller, {format_bytes(trial.decode_bytes_per_s)}/s unpacked"
        for trial in trials
    )
    rate = best.load_bytes_per_s(storage_bytes_per_s)
    against = f"loads at {format_bytes(rate)}/s instead of {format_bytes(storage_bytes_per_s)}/s"
    if rate < _WORTH * storage_bytes_per_s:
        return Choice(column, f"none: {tried}; the better {against}")
    return Choice(
        replace(column, compression=best.compression), f"{best.compression}: {tried}; {best.compression} {against}"
    )


def _pieces(column: Column, block: Block) -> list[bytes]:
    """Return the sample's bytes in blocks of the size that a part will have."""
    held = block.held[column.name]
    whole = held.values if isinstance(held, Flat) else held
    data = np.ascontiguousarray(whole).reshape(-1).view(np.uint8)[:_SAMPLE_BYTES].tobytes()
    return [data[begin : begin + BLOCK_BYTES] for begin in range(0, len(data), BLOCK_BYTES)]


def _try(compression: str, pieces: list[bytes]) -> Trial:
    packer: Any = codec(compression)
    packed = [packer.compress(piece, asbytes=True) for piece in pieces]
    num_bytes = sum(map(len, pieces))
    best_s, end_s = float("inf"), time.perf_counter() + _MEASURE_S
    while time.perf_counter() < end_s or best_s == float("inf"):
        begin_s = time.perf_counter()
        for piece, small in zip(pieces, packed, strict=True):
            packer.decompress(small, decompressed_size=len(piece))
        best_s = min(best_s, time.perf_counter() - begin_s)
    return Trial(compression, max(1, sum(map(len, packed))) / max(1, num_bytes), num_bytes / best_s)

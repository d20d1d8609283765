"""What is decided before a pack is written, from the source's first samples: columns, compression, rows in a block."""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError, DataError
from shoal.core.units import format_bytes
from shoal.data.pack.compression import Asked, block_rows, check_asked, choose
from shoal.data.pack.encode import Sample, encode_rows, size_of
from shoal.data.pack.infer import choose_columns, infer_columns
from shoal.data.pack.schema import Column
from shoal.data.pack.work import Group
from shoal.data.storage import measure_storage
from shoal.native import jpeg

_INFER_SAMPLES = 64
_SAMPLES = 4096
_BYTES = 4 << 20
_SECONDS = 1.0
_STORAGE_S = 0.25

Say = Callable[[str], None]


@dataclass(frozen=True)
class Decided:
    """What the parts will look like."""

    columns: tuple[Column, ...]
    block_rows: dict[str, int]
    samples: Iterator[Sample] | None
    """Those of the source's only slice, from its first on: an iterator gives them once."""
    fingerprint: str = ""
    """Of that slice, before the first of them was read."""


def decide(
    source: Any,
    groups: Sequence[Group],
    *,
    asked_columns: Sequence[str] | Mapping[str, str] | None,
    compression: Asked,
    restart_blocks: int,
    storage_bytes_per_s: float | None,
    folder: Path,
    say: Say,
) -> Decided:
    """Return the columns and how to compress them, and say why."""
    slices = [part for group in groups for part in group.slices]
    fingerprint = source.fingerprint(slices[0])
    first = iter(source.read(slices[0]))
    seen = _some(first)
    for part in slices[1:_INFER_SAMPLES]:  # where slices are tiny
        seen += _some(iter(source.read(part))) if len(seen) < _INFER_SAMPLES else []
    good = [values for _, values in seen if not isinstance(values, DataError)]
    if not good:
        raise seen[0][1] if seen and isinstance(seen[0][1], DataError) else DataError("the source has no samples.")
    known = source.columns if source.columns is not None else infer_columns(_whole(good[:_INFER_SAMPLES]))
    columns = with_restarts(choose_columns(known, asked_columns), restart_blocks, say)
    check_asked(compression, columns)
    more = _some(iter(source.read(slices[len(slices) // 2]))) if slices[1:] else []
    plain = tuple(_without_restarts(column) for column in columns)  # transcoding changes no sizes that matter here
    block = encode_rows(plain, [*seen, *more], is_strict=False).block
    is_auto = compression == "auto" or (isinstance(compression, Mapping) and len(compression) < len(columns))
    if is_auto and storage_bytes_per_s is None and any(column.kind != "tokens" for column in columns):
        storage_bytes_per_s = _measured(folder)
        say(f"storage: {folder} is read at {format_bytes(storage_bytes_per_s)}/s.")
    choices = choose(columns, compression, block, storage_bytes_per_s or 1.0)
    for choice in choices:
        say(f"{_described(choice.column)}. Compression: {choice.why}.")
    chosen = tuple(choice.column for choice in choices)
    is_once = len(slices) == 1 and not hasattr(source, "read_batches")
    samples = itertools.chain(seen, first) if is_once else None
    return Decided(chosen, block_rows(chosen, block), samples, fingerprint)


def _whole(samples: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the samples without those that lack a column which most have: these are named when they are written."""
    names = Counter(frozenset(sample) for sample in samples if isinstance(sample, Mapping))
    most: frozenset[str] = names.most_common(1)[0][0] if names else frozenset()
    return [sample for sample in samples if not isinstance(sample, Mapping) or not frozenset(sample) < most]


def _measured(folder: Path) -> float:
    try:
        return measure_storage(folder, seconds=_STORAGE_S).read_bytes_per_s
    except ConfigError as error:
        if isinstance(error.__context__, OSError):  # a full disk: what it means for a pack, the writer says
            raise error.__context__ from None
        raise


def with_restarts(columns: Sequence[Column], restart_blocks: int, say: Say) -> tuple[Column, ...]:
    """Return the columns, the images with restart segments if that was asked for and can be done."""
    if restart_blocks <= 0 or not any(column.kind == "image" for column in columns):
        return tuple(columns)
    if not jpeg.available():
        say("images: as they are. shoal was installed without its C part, so JPEGs get no restart segments.")
        return tuple(columns)
    extra = {"index": True, "restart_blocks": restart_blocks}
    return tuple(
        replace(column, extra={**column.extra, **extra}) if column.kind == "image" else column for column in columns
    )


def _without_restarts(column: Column) -> Column:
    kept = {name: value for name, value in column.extra.items() if name not in ("index", "restart_blocks")}
    return replace(column, extra=kept)


def _described(column: Column) -> str:
    shape = f" {list(column.shape)}" if column.shape else ""
    dtype = "" if column.kind in ("image", "text", "bytes") else f" {column.dtype}{shape}"
    return f"{column.name}: {column.kind}{dtype}"


def _some(source: Iterator[Sample]) -> list[Sample]:
    """Return the first samples: enough to measure with, but not more than a moment gives."""
    found: list[Sample] = []
    num_bytes, end_s = 0, time.monotonic() + _SECONDS
    for sample in itertools.islice(source, _SAMPLES):
        found.append(sample)
        num_bytes += 0 if isinstance(sample[1], DataError) else sum(size_of(value) for value in sample[1].values())
        if num_bytes >= _BYTES or (time.monotonic() > end_s and len(found) >= _INFER_SAMPLES):
            break
    return found

"""What every format gives: samples in one fixed order, cut into slices that can each be read by itself.

1. `slices(about_bytes)` cuts the source; the slices, read one after the other, are all samples in their order.
2. `read(slice)` yields `(label, values)`; what cannot be read comes as `(label, DataError)`, and reading goes on.
3. `fingerprint(slice)` before and after reading says whether the source changed in between.

Example: 10 rows of 100 bytes, `about_bytes=400`: the slices are rows [0, 4), [4, 8) and [8, 10); with `about_bytes=1e9`
there is one slice, [0, 10). The ten samples and their labels, "x.npy: row 0" to "x.npy: row 9", are the same.
"""

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.schema import Column, Flat

Sample = tuple[str, Mapping[str, Any] | DataError]
"""What names the sample in messages, and its values by column, or why there are none."""
Values = NDArray[Any] | Flat | Sequence[Any]
"""A column of a batch: one array, the rows' values end to end, or a list with one value a row."""
Batch = tuple[int, Callable[[int], str], Mapping[str, Values]]
"""How many rows, the label of each (from 0), and the columns, which stay as they are: they are still being written
when the next batch is read."""
BATCH_BYTES = 16 << 20
"""Rows are read this much at a time: large beside what a call costs, small beside a part."""


@dataclass(frozen=True)
class Slice:
    """Some consecutive samples: files, or rows (bytes, record batches) [begin, end) of one."""

    items: tuple[str, ...] = ()
    begin: int = 0
    end: int = 0
    num_bytes: int = 0  # about, as samples
    num_rows: int | None = None  # how many samples, where that is known before they are read


@runtime_checkable
class Source(Protocol):
    """Samples that can be read in slices, by several processes at once, in one fixed order."""

    @property
    def columns(self) -> tuple[Column, ...] | None:
        """What the samples hold, where the format says so."""

    def describe(self) -> dict[str, Any]:
        """Return what this is, for a manifest: JSON values, names and sizes, no absolute paths, no times."""

    def slices(self, about_bytes: int) -> list[Slice]:
        """Return slices of about `about_bytes` each, in order."""

    def read(self, part: Slice) -> Iterator[Sample]:
        """Yield the samples of a slice."""

    def fingerprint(self, part: Slice) -> str:
        """Return sizes and times of what `read(part)` reads, as a short text; "" where nothing can be told."""


def cut_rows(
    num_rows: int, row_bytes: float, about_bytes: int, *, items: tuple[str, ...] = (), multiple: int = 1
) -> list[Slice]:
    """Return slices of rows, each about `about_bytes`; all but the last begin at a multiple of `multiple` rows."""
    rows = _rounded(about_bytes, row_bytes, multiple)
    ranges = [(begin, min(begin + rows, num_rows)) for begin in range(0, num_rows, rows)]
    return [Slice(items, begin, end, int((end - begin) * row_bytes), end - begin) for begin, end in ranges]


def group_files(sizes: Mapping[str, int], about_bytes: int) -> list[Slice]:
    """Return slices of whole files, each a sample, in the mapping's order, each slice of about `about_bytes`."""
    slices, names, total = [], [], 0
    for name, size in sizes.items():
        names.append(name)
        total += size
        if total >= about_bytes:
            slices.append(Slice(tuple(names), 0, len(names), total, len(names)))
            names, total = [], 0
    if names:
        slices.append(Slice(tuple(names), 0, len(names), total, len(names)))
    return slices


def batch_rows(part: Slice, row_bytes: float, multiple: int = 1) -> Iterator[tuple[int, int]]:
    """Yield [begin, end) of the rows of a slice, about BATCH_BYTES each, whole multiples of `multiple` rows."""
    rows = _rounded(BATCH_BYTES, row_bytes, multiple)
    for begin in range(part.begin, part.end, rows):
        yield begin, min(begin + rows, part.end)


def _rounded(about_bytes: float, row_bytes: float, multiple: int) -> int:
    rows = max(1, int(about_bytes // max(row_bytes, 1)))
    return -(-rows // multiple) * multiple


def library(name: str, *, extra: str, what: str) -> Any:
    """Return the module `name`, or say what to install to read `what`."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"Reading {what} needs {name.partition('.')[0]}, which is not installed. Run: pip install 'shoal[{extra}]'"
        ) from error


def one_line(error: BaseException) -> str:
    """Return what an exception says, on one line, for the end of a message of ours."""
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__

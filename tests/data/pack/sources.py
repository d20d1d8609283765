"""Sources for tests: samples that are made up, and what can go wrong while they are read."""

import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.data.pack.schema import Column, Flat


def sample(row: int) -> dict[str, Any]:
    """Return a sample with a column of every kind but image and tokens."""
    draw = np.random.default_rng(row)
    return {
        "x": draw.standard_normal((3, 5)).astype(np.float32),
        "label": row,
        "even": row % 2 == 0,
        "words": draw.integers(0, 1000, row % 7).astype(np.int16),
        "boxes": draw.standard_normal((row % 3, 4)),
        "text": "né " * (row % 5),
        "blob": bytes(draw.integers(0, 256, row % 11).astype(np.uint8)),
    }


def jpeg(width: int = 64, height: int = 48, seed: int = 0) -> bytes:
    """Return an encoded image."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((width, height)).save(file, "jpeg", quality=90)
    return file.getvalue()


@dataclass(frozen=True)
class Rows:
    """A range of rows."""

    begin: int
    end: int
    num_bytes: int = 0
    num_rows: int | None = None


@dataclass
class MadeUp:
    """Samples 0 to `num_rows`, in slices of `slice_rows`; some of them bad."""

    num_rows: int = 1000
    slice_rows: int = 100
    row_bytes: int = 200
    wrong: tuple[int, ...] = ()
    """Rows whose x has another shape."""
    unreadable: tuple[int, ...] = ()
    kill_at: int | None = None
    """The row at which the process that reads is killed, if `fuse` is there."""
    fuse: Path | None = None
    changes: Path | None = None
    """A file whose content is the fingerprint; reading row 150 changes it."""
    columns: tuple[Column, ...] | None = None

    def describe(self) -> dict[str, Any]:
        return {"kind": "made up", "num_rows": self.num_rows}

    def slices(self, about_bytes: int) -> list[Rows]:
        size, cuts = self.slice_rows, range(0, self.num_rows, self.slice_rows)
        ends = [min(begin + size, self.num_rows) for begin in cuts]
        return [Rows(a, b, size * self.row_bytes, b - a) for a, b in zip(cuts, ends, strict=True)]

    def fingerprint(self, part: Rows) -> str:
        return self.changes.read_text() if self.changes else f"{part.begin}-{part.end}"

    def read(self, part: Rows) -> Iterator[tuple[str, Any]]:
        for row in range(part.begin, part.end):
            yield self._read(row)

    def _read(self, row: int) -> tuple[str, Any]:
        if row == self.kill_at and self.fuse is not None and self.fuse.exists():
            self.fuse.unlink()
            os.kill(os.getpid(), 9)
        if row == 150 and self.changes is not None:
            self.changes.write_text("other")
        if row in self.unreadable:
            return f"row {row}", DataError("the file ends here")
        values = sample(row)
        return f"row {row}", {**values, "x": values["x"][:, :4]} if row in self.wrong else values


class Batched(MadeUp):
    """The same samples, many at a time."""

    def read_batches(self, part: Rows) -> Iterator[Any]:
        for begin in range(part.begin, part.end, 37):
            rows = range(begin, min(begin + 37, part.end))
            if any(row in self.unreadable for row in rows):
                raise DataError("these rows cannot be read")
            samples = [self._read(row)[1] for row in rows]
            yield len(rows), lambda row, begin=begin: f"row {begin + row}", _columns(samples)


def _columns(samples: list[dict[str, Any]]) -> dict[str, Any]:
    shapes = {values["x"].shape for values in samples}
    words = [values["words"] for values in samples]
    offsets = np.cumsum([5, *map(len, words)])  # it need not begin at 0
    return {
        "x": np.stack([values["x"] for values in samples]) if len(shapes) == 1 else [v["x"] for v in samples],
        "label": np.array([values["label"] for values in samples]),
        "even": np.array([values["even"] for values in samples]),
        "words": Flat(np.concatenate([np.zeros(5, np.int16), *words]), offsets),
        "boxes": [values["boxes"] for values in samples],
        "text": [values["text"] for values in samples],
        "blob": [values["blob"] for values in samples],
    }


def files_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def assert_same(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Compare two samples, exactly."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert type(found[name]) is type(value) or np.asarray(found[name]).dtype == np.asarray(value).dtype, name
        np.testing.assert_array_equal(found[name], value, strict=isinstance(value, np.ndarray))

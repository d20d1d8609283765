"""What benchmarks/loading_exact.py loads: packs of several parts, none a multiple of its batch."""

import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from shoal.data.loading.crops import ImageOptions
from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack
from shoal.data.stage.moved import moved_view
from shoal.data.stage.staged import Staged
from shoal.data.view import View


@dataclass(frozen=True)
class Hashes:
    """A global batch."""

    samples: str
    """Of the numbers of its samples; empty where the loader does not tell them."""
    values: str
    """Of the bytes of all columns."""

    def is_like(self, other: "Hashes") -> bool:
        """Return whether both are the same batch, as far as both tell."""
        return self.values == other.values and (self.samples == other.samples or "" in (self.samples, other.samples))


@dataclass
class Dataset:
    """A pack, what is read of it, and the hash of each global batch as one worker loads it."""

    name: str
    path: Path
    batch_size: int
    options: dict[str, Any] = field(default_factory=dict)
    block_rows: int | None = None
    seed: int = 5
    expected: list[Hashes] = field(default_factory=list)

    def view(self, staged: Staged | None = None) -> View:
        """Return what is read, from the copy if there is one."""
        view = View(self.path, **self.options)
        return view if staged is None or staged.path == self.path else moved_view(view, staged)

    @property
    def order(self) -> dict[str, Any]:
        """What decides which samples make a batch."""
        return {"batch_size": self.batch_size, "seed": self.seed, "block_rows": self.block_rows}


def make_datasets(folder: Path, *, small: bool) -> list[Dataset]:
    """Write the packs, and return what is read of them."""
    count = 61 if small else 211
    numbers = np.random.default_rng(0)
    rows = [{"id": np.int64(row), "x": numbers.standard_normal(8).astype(np.float32)} for row in range(count)]
    lengths = numbers.integers(0, 60, count)
    texts = [{"tokens": numbers.integers(0, 50_000, length).astype(np.uint16)} for length in lengths]
    images = [{"image": _jpeg(numbers), "id": np.int64(row)} for row in range(31 if small else 67)]
    quiet: dict[str, Any] = {"compression": "none", "workers": 1, "report": Quiet()}
    pack(rows, folder / "rows.pack", part_bytes=count * 7, **quiet)
    pack(texts, folder / "tokens.pack", part_bytes=count * 11, columns={"tokens": "tokens"}, **quiet)
    pack(images, folder / "images.pack", part_bytes=16_000, **quiet)
    return [
        Dataset("rows", folder / "rows.pack", 16),
        Dataset("blocks", folder / "rows.pack", 16, block_rows=6),
        Dataset("tokens", folder / "tokens.pack", 24, {"window": 17}),
        Dataset("images", folder / "images.pack", 10, {"image": ImageOptions(size=24)}),
    ]


def _jpeg(numbers: np.random.Generator) -> bytes:
    width, height = numbers.integers(30, 90, 2)
    coarse = numbers.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    encoded = io.BytesIO()
    Image.fromarray(coarse).resize((width, height)).save(encoded, "JPEG", quality=85)
    return encoded.getvalue()

"""Packs for tests of the loader."""

from pathlib import Path
from typing import Any

import numpy as np

from shoal.data.loader import Loader
from shoal.data.order import order
from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack
from tests.data.pack.sources import jpeg, sample

NUM_ROWS = 203


def rows_pack(path: Path, num_rows: int, *, compression: Any = "none", part_bytes: float = 4000) -> Path:
    """Write a pack with columns of every kind but tokens and images, in several parts."""
    pack((sample(row) for row in range(num_rows)), path, compression=compression, part_bytes=part_bytes, report=Quiet())
    return path


def labels(loader: Loader) -> list[list[int]]:
    """Return the labels of each batch."""
    return [batch["label"].tolist() for batch in loader]


def expected(batch_size: int, *, epoch: int = 0, seed: int = 0) -> list[list[int]]:
    """Return the same of a pack of `NUM_ROWS`, as an epoch has them."""
    samples = order(NUM_ROWS, np.arange(NUM_ROWS), seed=seed, epoch=epoch).tolist()
    return [samples[first : first + batch_size] for first in range(0, NUM_ROWS, batch_size)]


def document(number: int, *, longest: int = 40) -> np.ndarray[Any, Any]:
    """Return the tokens of a document; some are empty."""
    length = int(np.random.default_rng(number).integers(0, longest))
    return (np.arange(length) + 1000 * number).astype(np.uint16)


def tokens_pack(path: Path, num_documents: int, *, part_bytes: float = 600) -> Path:
    """Write a pack of documents, in several parts."""
    documents = ({"tokens": document(number)} for number in range(num_documents))
    kinds = {"tokens": "tokens"}
    pack(documents, path, columns=kinds, compression="none", part_bytes=part_bytes, report=Quiet())
    return path


def images_pack(path: Path, num_images: int, *, restart_blocks: int = 2, part_bytes: float = 20_000) -> Path:
    """Write a pack of small JPEGs of several sizes, with their numbers."""
    images = ({"image": jpeg(48 + 8 * (n % 5), 40 + 8 * (n % 3), seed=n), "label": n} for n in range(num_images))
    pack(images, path, restart_blocks=restart_blocks, part_bytes=part_bytes, compression="none", report=Quiet())
    return path

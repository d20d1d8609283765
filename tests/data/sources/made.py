"""What the tiny datasets of all formats are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

NUM_ROWS = 23
X = np.arange(NUM_ROWS * 6, dtype=np.float32).reshape(NUM_ROWS, 2, 3) / 4
Y = np.arange(NUM_ROWS, dtype=np.int64) * 3 % 7
WORDS = [f"wörd {number} " * (1 + number % 4) for number in range(NUM_ROWS)]
JPEGS = [b"\xff\xd8\xff" + f"picture {number}".encode() * (5 + number) for number in range(NUM_ROWS)]
"""They begin as JPEGs do: nothing here decodes them."""
ROWS = [{"x": X[row], "y": Y[row]} for row in range(NUM_ROWS)]
CLASSES = ("cat", "dog")


@dataclass(frozen=True)
class Made:
    """What `open_source` is called with, what must come, and what is written over to change or break it."""

    src: Any
    samples: Sequence[Mapping[str, Any]]
    options: dict[str, Any] = field(default_factory=dict)
    files: tuple[Path, ...] = ()
    """One of them is what a slice reads; none where nothing lies on disk."""

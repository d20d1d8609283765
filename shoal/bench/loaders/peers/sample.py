"""The samples that every loader is given: plain files that NumPy maps.

`images.bin` and `offsets.npy`: encoded images one after another; `tokens.bin`: a stream; `rows.npy`: an array.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Sample:
    """A map-style dataset of what the files hold: bytes of an image, a window of tokens, or a row. Picklable."""

    def __init__(self, folder: Path, *, kind: str, window: int, dtype: str = "") -> None:
        self.folder, self.kind, self.window, self._dtype = folder, kind, window, dtype
        # "c": a private map counts as writable, which torch.from_numpy wants; nothing is written.
        if kind == "images":
            self.values: NDArray[Any] = np.memmap(folder / "images.bin", np.uint8, mode="c")
            self._offsets = np.load(folder / "offsets.npy")
            self._count = len(self._offsets) - 1
        elif kind == "tokens":
            self._dtype = dtype or (folder / "dtype").read_text()
            self.values = np.memmap(folder / "tokens.bin", self._dtype, mode="c")
            self._count = (len(self.values) - 1) // (window - 1)
        else:
            self.values = np.load(folder / "rows.npy", mmap_mode="c")
            self._count = len(self.values)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.folder, self.kind, self.window, self._dtype)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if self.kind == "images":
            return self.values[self._offsets[index] : self._offsets[index + 1]].tobytes()
        if self.kind == "tokens":
            return self.values[index * (self.window - 1) : index * (self.window - 1) + self.window]
        return self.values[index]

    def first(self, seconds: float) -> Iterator[Any]:
        """Yield the samples from the first on, for at most so long."""
        end_s = time.monotonic() + seconds
        for index in range(self._count):
            if time.monotonic() > end_s and index:
                return
            yield self[index]


def _opened(folder: Path, kind: str, window: int, dtype: str) -> Sample:
    return Sample(folder, kind=kind, window=window, dtype=dtype)

"""A view of a pack, moved to the copy of it."""

from pathlib import Path

import numpy as np

from shoal.data.order import Indices
from shoal.data.pack.reader import Pack
from shoal.data.stage.staged import Staged
from shoal.data.view import View


def moved_view(view: View, staged: Staged) -> View:
    """Return the same samples as `view` gives, read from the copy; no part is waited for before it is read."""
    where = _Where(view.pack.path, staged)
    pack = Pack(staged.path, locate=where, arriving=staged.arriving)
    moved = view.moved_to(pack)
    assert moved.num_samples == view.num_samples, (moved.num_samples, view.num_samples)
    pack.close()  # what was read to make the view (where documents begin) was read at the source
    where.is_moved = True
    return moved


def first_samples(view: View) -> Indices:
    """Return the number of the first sample of each part, and the number of samples at the end.

    Of tokens about: by how many of them each part has.
    """
    manifest = view.pack.manifest
    if not view.is_of_tokens:
        return np.array(manifest.first_rows, dtype=np.int64)
    names = [column.name for column in manifest.columns if column.kind == "tokens"]
    counts = [sum(part.num_values[name] for name in names) for part in manifest.parts]
    ends = np.cumsum([0, *counts]) / max(1, sum(counts)) * view.num_samples
    starts: Indices = np.rint(ends).astype(np.int64)
    return starts


class _Where:
    """Where the files of a pack are: at the source at first, then at the copy."""

    def __init__(self, source: Path, staged: Staged) -> None:
        self._source, self._staged, self.is_moved = source, staged, False

    def __call__(self, part: int, name: str) -> Path:
        return self._staged.locate(part, name) if self.is_moved else self._source / name

"""Whole documents in rows of one length, for models that see one document at a time.

1. The documents of a part, in their order, fill row after row: each row takes documents until the next one does not
   fit. One that is longer than a row is cut. A row is therefore one stretch of the part's stream.
2. The rows of all parts, one part after the other, are the samples. They do not depend on workers, seeds or epochs. How
   many there are in each part was counted when the pack was written, for the usual widths; for others the offsets of
   all documents are read once, when the loader is made, by threads.
3. Where the rows of a part begin is found when one of them is first asked for: of every 32nd it is kept.
4. Each token comes with its document's number in the row and its position in that document; what a row has left over is
   0 in document -1.

Example: rows of 6, documents of 3, 4, 2 and 9 tokens: rows (3), (4, 2), (6 of 9), (3 of 9).
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.core.fork_lock import ForkLock
from shoal.core.host import usable_cores
from shoal.data.loading.columns import Request, cut_tensor
from shoal.data.loading.slot import Slot
from shoal.data.loading.tables import Maps
from shoal.data.loading.windows import refuse_compressed
from shoal.data.order import Indices
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column
from shoal.native.gather import Parts, gather_bytes
from shoal.native.order import locate
from shoal.native.tokens import document_places, mark_rows, rows_at


class PackedDocuments:
    """Rows of `width` tokens that hold whole documents."""

    def __init__(self, pack: Pack, column: Column, *, width: int) -> None:
        refuse_compressed(pack, column)
        self._pack, self._name, self._width = pack, column.name, width
        self._maps = Maps(pack, column.name, is_fixed=False)
        parts = pack.manifest.parts
        self._lock = ForkLock()
        self._marks, self._is_marked = Parts([None] * len(parts)), np.zeros(len(parts), dtype=bool)
        counts = pack.manifest.packed_rows(column.name, width) or self._count(len(parts))
        self._starts = np.array([0, *accumulate(counts)], dtype=np.int64)
        self.num_samples = int(self._starts[-1])
        self.sample_bytes = width * 16

    def load(self, request: Request, slot: Slot) -> Mapping[str, Sequence[Any]]:
        """Gather the rows, widened to int64, with the places of their tokens."""
        part, row = locate(request.samples, self._starts)
        found = self._maps.find(part, row)
        assert found.offsets is not None
        begin, length = self._stretches(found.offsets, part, row)
        shape = (len(row), self._width)
        out = slot.tensor(self._name, shape, torch.int64)
        document = slot.tensor(f"{self._name}.document", shape, torch.int32)
        position = slot.tensor(f"{self._name}.position", shape, torch.int32)
        tokens = _gathered(found.values, part, begin, length)
        out.zero_().numpy()[np.arange(self._width) < length[:, None]] = tokens
        document_places(found.offsets, part, begin, length, document=document.numpy(), position=position.numpy())
        every = {self._name: out, f"{self._name}.document": document, f"{self._name}.position": position}
        return {name: cut_tensor(tensor, request.sizes) for name, tensor in every.items()}

    def _stretches(self, offsets: Parts, part: NDArray[np.int32], row: Indices) -> tuple[Indices, Indices]:
        """Return where each row begins in the stream of its part, and how many tokens it has."""
        if not self._is_marked[part].all():
            for number in np.unique(part).tolist():
                self._mark_once(number)
        begin, end = rows_at(offsets, self._marks, part, row, self._width)
        return begin, end - begin

    def _mark_once(self, part: int) -> None:
        with self._lock:
            if self._is_marked[part]:
                return
            count, said = self._mark(part), int(self._starts[part + 1] - self._starts[part])
            if count != said:
                what = f"part {self._pack.manifest.parts[part].name} of {self._pack.path}, column {self._name!r}"
                rows = f"fills {count:,} rows of {self._width} tokens, but the manifest says {said:,}."
                raise DataError(f"{what}, {rows}")
            self._is_marked[part] = True

    def _mark(self, part: int) -> int:
        """Find the rows of a part, and return how many there are."""
        count, self._marks[part] = mark_rows(self._pack.offsets(part, self._name), self._width)
        return count

    def _count(self, num_parts: int) -> list[int]:
        """Return how many rows each part has, by a look at every document of all."""
        with ThreadPoolExecutor(usable_cores(), thread_name_prefix="shoal-rows") as threads:
            counts = list(threads.map(self._mark, range(num_parts)))
        self._is_marked[:] = True
        return counts


def _gathered(streams: Parts, part: NDArray[np.int32], begin: Indices, length: Indices) -> NDArray[Any]:
    """Return the tokens [begin, begin + length) of each part, one stretch after the other."""
    numbers, mine = np.unique(part, return_inverse=True)
    order = np.argsort(mine, kind="stable")
    firsts = np.searchsorted(mine[order], np.arange(len(numbers)))
    place = np.empty_like(begin)  # among those of its part
    place[order] = np.arange(len(part)) - firsts[mine[order]]
    # A stretch is row 2 x place of offsets that are begin, end, begin, end, ...
    bounds = np.stack([begin, begin + length], axis=1)[order]
    offsets = [each.reshape(-1) for each in np.split(bounds, firsts[1:])]
    values, _ = gather_bytes([streams.arrays[number] for number in numbers], offsets, mine.astype(np.int32), 2 * place)
    return values

"""Whole documents in rows of one length, for models that see one document at a time.

1. The documents of a part, in their order, fill row after row: each row takes documents until the next one does not
   fit. One that is longer than a row is cut. A row is therefore one stretch of the part's stream: 8 bytes say where.
2. The rows of all parts are the samples. They are found by one pass over the documents' offsets when the loader is made
   (8 bytes a document), and do not depend on workers, seeds or epochs.
3. Each token comes with its document's number in the row and its position in that document; what a row has left over is
   0 in document -1.

Example: rows of 6, documents of 3, 4, 2 and 9 tokens: rows (3), (4, 2), (6 of 9), (3 of 9).
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from shoal.data.loading.columns import Request, cut_tensor
from shoal.data.loading.slot import Slot
from shoal.data.loading.tables import Maps
from shoal.data.loading.windows import refuse_compressed
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column
from shoal.native.gather import Parts, gather_bytes
from shoal.native.order import locate
from shoal.native.tokens import document_places, fill_rows


class PackedDocuments:
    """Rows of `width` tokens that hold whole documents."""

    def __init__(self, pack: Pack, column: Column, *, width: int) -> None:
        refuse_compressed(pack, column)
        self._name, self._width = column.name, width
        self._maps = Maps(pack, column.name, is_fixed=False)
        rows = [fill_rows(pack.offsets(part, column.name), width) for part in range(len(pack.manifest.parts))]
        self._rows = Parts(rows)
        self._starts = np.array([0, *accumulate(len(each) - 1 for each in rows)], dtype=np.int64)
        self.num_samples = int(self._starts[-1])
        self.sample_bytes = width * 16

    def load(self, request: Request, slot: Slot) -> Mapping[str, Sequence[Any]]:
        """Gather the rows, widened to int64, with the places of their tokens."""
        part, row = locate(request.samples, self._starts)
        found = self._maps.find(part, row)
        assert found.offsets is not None
        tokens, bounds = gather_bytes(found.values, self._rows, part, row)
        length = np.diff(bounds)
        shape = (len(row), self._width)
        out = slot.tensor(self._name, shape, torch.int64)
        document = slot.tensor(f"{self._name}.document", shape, torch.int32)
        position = slot.tensor(f"{self._name}.position", shape, torch.int32)
        out.zero_().numpy()[np.arange(self._width) < length[:, None]] = tokens
        start = self._begin_of(part, row)
        document_places(found.offsets, part, start, length, document=document.numpy(), position=position.numpy())
        every = {self._name: out, f"{self._name}.document": document, f"{self._name}.position": position}
        return {name: cut_tensor(tensor, request.sizes) for name, tensor in every.items()}

    def _begin_of(self, part: np.ndarray[Any, Any], row: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        start = np.empty_like(row)
        for number in np.unique(part).tolist():
            mine, rows = part == number, self._rows.arrays[number]
            assert rows is not None
            start[mine] = rows[row[mine]]
        return start

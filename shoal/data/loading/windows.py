"""Token streams as samples of one length: windows over the stream.

1. The documents of a part lie one after another in one stream. Window w of a part is its tokens
   [w * stride, w * stride + width); a stride of width - 1 makes the last token of a window the first of the next, so
   that every token is predicted once. What is left at the end of a part, less than a window, is not used.
2. The windows of all parts, one part after the other, are the samples: any is found without reading the others.
3. On request each token comes with its document's number in the window and its position in that document, which is
   what a model needs that must not look into the document before.

Example: width 5, a part with documents (1 2 3) (4 5 6 7 8 9): the windows are 1 2 3 4 5 and 5 6 7 8 9; of the first,
the documents are 0 0 0 1 1 and the positions 0 1 2 0 1.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from shoal.core.errors import DataError
from shoal.data.loading.columns import Request, cut_tensor
from shoal.data.loading.ring import Gathered
from shoal.data.loading.slot import Slot
from shoal.data.loading.tables import Maps
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column
from shoal.native.gather import gather_windows
from shoal.native.gather_ring import RingColumn
from shoal.native.order import locate
from shoal.native.tokens import document_places


class Windows:
    """Windows of `width` tokens of a column, int64 whatever the column is stored as."""

    def __init__(self, pack: Pack, column: Column, *, width: int, stride: int, with_documents: bool = False) -> None:
        refuse_compressed(pack, column)
        self._name, self._width, self._stride, self._with_documents = column.name, width, stride, with_documents
        self._maps = Maps(pack, column.name, is_fixed=False)
        counts = [max(0, (tokens - width) // stride + 1) for tokens in tokens_of_parts(pack, column.name)]
        self.starts = np.array([0, *accumulate(counts)], dtype=np.int64)
        self.num_samples = int(self.starts[-1])
        self.sample_bytes = width * (16 if with_documents else 8)

    def load(self, request: Request, slot: Slot) -> Mapping[str, Sequence[Any]]:
        """Gather the windows, widened to int64 on the way."""
        part, window = locate(request.samples, self.starts)
        start = window * self._stride
        found = self._maps.find(part, start)
        out = slot.tensor(self._name, (len(start), self._width), torch.int64)
        gather_windows(found.values, part, start, out.numpy())
        loaded: dict[str, Sequence[Any]] = {self._name: cut_tensor(out, request.sizes)}
        if self._with_documents:
            assert found.offsets is not None
            shape = (len(start), self._width)
            document = slot.tensor(f"{self._name}.document", shape, torch.int32)
            position = slot.tensor(f"{self._name}.position", shape, torch.int32)
            length = np.full_like(start, self._width)
            document_places(found.offsets, part, start, length, document=document.numpy(), position=position.numpy())
            loaded[f"{self._name}.document"] = cut_tensor(document, request.sizes)
            loaded[f"{self._name}.position"] = cut_tensor(position, request.sizes)
        return loaded

    @property
    def is_gathered(self) -> bool:
        """Whether batches are nothing but windows of maps."""
        return not self._with_documents

    def gathered(self) -> Gathered | None:
        """Return what C gathers by itself, once all parts are mapped."""
        parts = self._maps.every()
        if parts is None:
            return None
        column = RingColumn(parts, width=self._width, stride=self._stride)
        return Gathered(self._name, column, (self._width,), torch.int64, torch.int64)


def tokens_of_parts(pack: Pack, column: str) -> list[int]:
    """Return how many tokens each part has: as the manifest says, or else by a look at every part."""
    parts = pack.manifest.parts
    said = [getattr(part, "num_values", {}).get(column) for part in parts]
    return [len(pack.values(number, column)) if tokens is None else tokens for number, tokens in enumerate(said)]


def refuse_compressed(pack: Pack, column: Column) -> None:
    """Raise for a column that cannot be gathered from its map."""
    if column.compression != "none":
        raise DataError(
            f"column {column.name!r} of {pack.path} is compressed ({column.compression}), but windows are gathered "
            f"from its map. Pack it with --compression none."
        )

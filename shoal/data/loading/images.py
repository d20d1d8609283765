"""Encoded images as batches: decoded, cropped, resized and flipped by one call a chunk, without Python's lock."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shoal.core.errors import DataError
from shoal.data.loading.columns import Request, cut_tensor
from shoal.data.loading.crops import ImageOptions, boxes_of
from shoal.data.loading.slot import Slot
from shoal.data.loading.tables import open_table
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column
from shoal.native.jpeg import crop_resize_batch, sizes


class ImageColumn:
    """uint8 tensors [samples, 3, height, width] of an image column."""

    def __init__(self, pack: Pack, column: Column, options: ImageOptions) -> None:
        self._name, self._options, self._path = column.name, options, pack.path
        self._images = open_table(pack, column.name, compression=column.compression)
        self._indexes = None
        if column.extra.get("index"):
            self._indexes = open_table(pack, f"{column.name}.index", compression=column.compression)
        height, width = options.shape
        self.sample_bytes = 3 * height * width

    def load(self, request: Request, slot: Slot) -> Mapping[str, Sequence[Any]]:
        """Decode into the slot."""
        images = self._images.find(request.part, request.row)
        indexes = self._indexes.find(request.part, request.row) if self._indexes else None
        assert images.offsets is not None
        found, problems = sizes(images.values, images.offsets, images.part, images.row)
        self._refuse(problems, request)
        boxes, flips = boxes_of(self._options, found, request.samples, seed=request.seed, epoch=request.epoch)
        out = slot.tensor(self._name, self._shape(len(request.row)), torch.uint8)
        problems = crop_resize_batch(
            images.values,
            images.offsets,
            indexes.values if indexes else None,
            indexes.offsets if indexes else None,
            images.part,
            images.row,
            boxes,
            flips,
            out.numpy(),
            antialias=self._options.antialias,
            channels_last=self._options.channels_last,
        )
        self._refuse(problems, request)
        return {self._name: cut_tensor(out, request.sizes)}

    def _shape(self, count: int) -> tuple[int, ...]:
        height, width = self._options.shape
        return (count, height, width, 3) if self._options.channels_last else (count, 3, height, width)

    def _refuse(self, problems: dict[int, str], request: Request) -> None:
        for at, why in problems.items():
            raise DataError(f"sample {request.samples[at]} of {self._path}, column {self._name!r}: {why}.")

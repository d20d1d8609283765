"""A pack as the source of a DALI pipeline: encoded images and labels in shoal's order; DALI decodes and augments.

    from nvidia.dali import fn, pipeline_def
    from shoal.data.dali import dali_source

    source = dali_source("photos.pack", batch_size=64, columns=("image", "label"))

    @pipeline_def(batch_size=64, num_threads=2, device_id=None)
    def pipeline():
        jpegs, labels = fn.external_source(source=source, num_outputs=2, batch=True, batch_info=True)
        return fn.decoders.image_random_crop(jpegs, device="cpu"), labels

Images are views of the pack's maps: DALI copies them into its own memory, and nobody does before.
"""

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import ConfigError, DataError
from shoal.data.order import Indices, Order
from shoal.data.pack.reader import Pack
from shoal.data.partition import Schedule
from shoal.native.order import locate


class DaliSource:
    """What `fn.external_source(..., batch=True, batch_info=True)` calls once a batch."""

    def __init__(self, pack: Pack, schedule: Schedule, order: Order, columns: Sequence[str]) -> None:
        self._pack, self._schedule, self._order, self._columns = pack, schedule, order, tuple(columns)
        self._starts = np.array(pack.manifest.first_rows, dtype=np.int64)

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return self._schedule.steps_per_epoch

    def __call__(self, info: Any) -> tuple[list[NDArray[Any]], ...]:
        """Return a list of arrays for each column. `info` is DALI's BatchInfo, or the batch's number in epoch 0.

        Raises StopIteration at the end of an epoch, as DALI has it; the pipeline's reset() then begins the next.
        """
        batch, epoch = getattr(info, "iteration", info), getattr(info, "epoch_idx", 0)
        if batch >= len(self):
            raise StopIteration
        step = epoch * len(self) + batch
        positions, _ = self._schedule.positions(range(step, step + 1))
        part, row = locate(self._order.samples(positions, epoch=epoch), self._starts)
        return tuple(self._values(name, part, row) for name in self._columns)

    def _values(self, name: str, part: NDArray[np.int32], row: Indices) -> list[NDArray[Any]]:
        is_fixed = self._pack.columns[name].is_fixed
        found = []
        for number, at in zip(part.tolist(), row.tolist(), strict=True):
            values = self._pack.values(number, name)
            if is_fixed:
                found.append(np.asarray(values[at]))
            else:
                offsets = self._pack.offsets(number, name)
                found.append(values[offsets[at] : offsets[at + 1]])
        return found


def dali_source(
    pack: str | os.PathLike[str] | Pack,
    *,
    batch_size: int,
    columns: Sequence[str] = ("image", "label"),
    shuffle: bool = True,
    seed: int = 0,
    shares: Sequence[float] = (1.0,),
    index: int = 0,
    block_rows: int | None = None,
) -> DaliSource:
    """Return a source of worker `index`'s part of each global batch, one output a column, in the loader's order.

    `pack` is a pack or its path, `columns` what of it is given, which must not be compressed. `batch_size` is that of
    all workers together, and `shares` are their fractions of it. `shuffle`, `seed` and `block_rows` are as in a Job.
    """
    opened = pack if isinstance(pack, Pack) else Pack(pack)
    for name in columns:
        if name not in opened.columns:
            raise DataError(f"{opened.path} has no column {name!r}. It has: {', '.join(opened.columns)}.")
        if opened.columns[name].compression != "none":
            raise DataError(f"column {name!r} of {opened.path} is compressed. Pack it with --compression none.")
    if batch_size < 1 or not 0 <= index < len(shares):
        raise ConfigError(
            f"dali_source(batch_size={batch_size}, index={index}, shares={tuple(shares)}) makes no sense."
        )
    schedule = Schedule(opened.num_rows, batch_size, shares=tuple(shares), index=index)
    order = Order(opened.num_rows, seed=seed, is_shuffled=shuffle, block_rows=block_rows)
    return DaliSource(opened, schedule, order, columns)

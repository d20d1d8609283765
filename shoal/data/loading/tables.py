"""Where the rows of a pack's column lie in memory: in the maps of its parts, or in blocks that were decompressed."""

from collections import OrderedDict
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shoal.core.fork_lock import ForkLock
from shoal.data.loading.warm import Warmer
from shoal.data.order import Indices, Order
from shoal.data.pack.reader import Pack, Reading
from shoal.native.gather import Parts

_CACHE_BYTES = 256 << 20
_SMALL_BYTES = 16 << 10
"""Larger samples are several pages, of which the kernel had better read more than one at a time."""


class Found(NamedTuple):
    """Item i is row `row[i]` of array `part[i]`; of variable rows, `offsets` says where each begins."""

    values: Parts
    offsets: Parts | None
    part: NDArray[np.int32]
    row: Indices


class Table(Protocol):
    """A column of a pack."""

    def find(self, part: NDArray[np.int32], row: Indices) -> Found:
        """Return where these rows lie, given by their part and their number in it."""


_WARMER = Warmer()
"""One for the whole process: the memory that it may fill is the machine's."""


def expect(pack: Pack, order: Order) -> None:
    """Prepare for how `pack` will be read: small samples at random, or else; and whether memory can hold all of it."""
    is_random = order.is_shuffled and order.block_rows is None
    is_small = pack.manifest.num_bytes < _SMALL_BYTES * order.num_samples
    if is_random and is_small:
        pack.expect(Reading(is_scattered=True, fits=pack.manifest.num_bytes <= _WARMER.left_bytes))


def open_table(pack: Pack, column: str, *, compression: str, is_fixed: bool = False) -> Table:
    """Return the table of a column, or of what goes with it (`NAME.shape`, `NAME.index`)."""
    return Maps(pack, column, is_fixed=is_fixed) if compression == "none" else Blocks(pack, column)


class Maps:
    """A column that is read from the maps; each part is mapped when a row of it is first asked for."""

    def __init__(self, pack: Pack, column: str, *, is_fixed: bool) -> None:
        self._pack, self._column, self._is_fixed = pack, column, is_fixed
        count = len(pack.manifest.parts)
        self._values, self._offsets = Parts([None] * count), Parts([None] * count)
        self._is_mapped = np.zeros(count, dtype=bool)
        self._lock = ForkLock()

    def find(self, part: NDArray[np.int32], row: Indices) -> Found:
        """Return the rows as they are: in the parts."""
        if not self._is_mapped.all() and not self._is_mapped[part].all():
            self._map(np.unique(part).tolist())
        return Found(self._values, self._offsets, part, row)

    def every(self) -> Parts | None:
        """Return the values of all parts, once each has been mapped."""
        return self._values if self._is_mapped.all() else None

    def _map(self, parts: list[int]) -> None:
        with self._lock:
            for number in parts:
                if not self._is_mapped[number]:
                    values = self._pack.values(number, self._column)
                    self._values[number] = values
                    if self._pack.reading.fits:
                        _WARMER.add(values, is_scattered=self._pack.reading.is_scattered)
                    if not self._is_fixed:
                        self._offsets[number] = self._pack.offsets(number, self._column)
                    self._is_mapped[number] = True


class Blocks:
    """A compressed column; the blocks used last are kept as long as they take less than `cache_bytes`."""

    def __init__(self, pack: Pack, column: str, *, cache_bytes: int = _CACHE_BYTES) -> None:
        self._pack, self._column, self._cache_bytes = pack, column, cache_bytes
        self._block_rows = pack.block_rows(column)
        self._kept: OrderedDict[tuple[int, int], tuple[NDArray[Any], Indices | None]] = OrderedDict()
        self._kept_bytes = 0
        self._lock = ForkLock()

    def find(self, part: NDArray[np.int32], row: Indices) -> Found:
        """Return the rows in the blocks that hold them, which are decompressed if need be."""
        block, inside = np.divmod(row, self._block_rows)
        keys, number = np.unique(part.astype(np.int64) << 32 | block, return_inverse=True)
        blocks = [self._block(int(key) >> 32, int(key) & 0xFFFFFFFF) for key in keys]
        offsets = [block[1] for block in blocks]
        return Found(
            Parts([block[0] for block in blocks]),
            None if any(offset is None for offset in offsets) else Parts(offsets),
            number.astype(np.int32),
            inside,
        )

    def _block(self, part: int, block: int) -> tuple[NDArray[Any], Indices | None]:
        with self._lock:
            if (part, block) in self._kept:
                self._kept.move_to_end((part, block))
                return self._kept[part, block]
        made = self._pack.block(part, self._column, block)  # outside the lock: this is what takes time
        with self._lock:
            if (part, block) not in self._kept:
                self._kept[part, block] = made
                self._kept_bytes += _num_bytes(made)
            while self._kept_bytes > self._cache_bytes and len(self._kept) > 1:
                self._kept_bytes -= _num_bytes(self._kept.popitem(last=False)[1])
        return made


def _num_bytes(block: tuple[NDArray[Any], Indices | None]) -> int:
    values, offsets = block
    return values.nbytes + (0 if offsets is None else offsets.nbytes)

"""Batches that need nothing but a gather, from parts that are all mapped: threads of C make them (gather_ring.c).

Python takes part in a batch by one call and one view a column, some 5 us, and nobody waits for its lock. The thread
that asks gathers too while its batch is not there yet, so that `threads` counts it.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.data.loading.chunk import Load
from shoal.data.loading.pace import Pace
from shoal.data.loading.slot import Slot
from shoal.data.order import Order, Permutation
from shoal.data.partition import Schedule
from shoal.native.gather_ring import FAILED, MOST_AHEAD, NOT_YET, Ring, RingColumn, RingSchedule

_NOTE_S = 1e-3
"""How often the pace learns what loading cost: noting it takes as long as giving a small batch."""


@dataclass(frozen=True)
class Gathered:
    """A column of batches that C can gather by itself."""

    name: str
    column: RingColumn
    shape: tuple[int, ...]
    """Of one sample."""
    stored: torch.dtype
    dtype: torch.dtype
    """What a batch is given as: the same bits as `stored`."""


@dataclass(frozen=True)
class GatheredSamples:
    """All columns of a pack's samples, and where its parts begin: part p holds samples [starts[p], starts[p + 1])."""

    columns: Sequence[Gathered]
    starts: NDArray[np.int64]


class RingFeed:
    """The batches of `steps`. `load` loads one that C has refused, to say what is wrong with it."""

    def __init__(
        self,
        samples: GatheredSamples,
        steps: range,
        load: Load,
        *,
        schedule: Schedule,
        order: Order,
        threads: int,
        prefetch: int | None,
        pace: Pace,
        timeout_s: float,
    ) -> None:
        self._columns, self._steps, self._load = samples.columns, steps, load
        self._order, self._per_epoch = order, schedule.steps_per_epoch
        self._threads, self._prefetch, self._pace, self._timeout_s = threads, prefetch, pace, timeout_s
        first, last = _part(schedule, 0), _part(schedule, self._per_epoch - 1)
        self._counts = first[1] - first[0], last[1] - last[0]
        permutation = self._permutation(0) if order.is_shuffled else None
        self._ring = Ring(
            [column.column for column in samples.columns],
            RingSchedule(
                num_samples=order.num_samples,
                batch_size=schedule.batch_size,
                steps_per_epoch=self._per_epoch,
                part=first,
                last_part=last,
                steps=steps,
                grid=permutation.grid if permutation else None,
                num_keys=len(permutation.keys) if permutation else 0,
                starts=samples.starts,
            ),
        )
        self._slots: list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
        """Of each slot: a whole batch, and one with as many samples as the last of an epoch."""
        self._ahead = -1
        self._noted: tuple[float, float, float] = (0.0, 0.0, 0.0)
        """When the pace was told, and what the ring's times were then."""
        self._batches = 0
        """Given since then."""

    def batches(self) -> Generator[dict[str, torch.Tensor], None, None]:
        """Yield the batches in order; close it when you stop before the end."""
        self._tell_keys(self._steps.start // self._per_epoch)
        self._keep_pace()
        self._noted = (time.perf_counter(), *self._ring.times_s())
        last = self._per_epoch - 1
        try:
            for step in self._steps:
                slot, place = self._ask(), step % self._per_epoch
                if place == 0 or step == self._steps.start:
                    self._tell_keys(step // self._per_epoch + 1)
                if slot is None:
                    yield self._load(range(step, step + 1), Slot()).batches[0]  # which says what is wrong with it
                else:
                    views = self._slots[slot][place == last]
                    # Tensors of their own: who reshapes one in place must not reshape what comes after it.
                    yield {name: tensor.detach() for name, tensor in views.items()}
                self._batches += 1
                if time.perf_counter() - self._noted[0] > _NOTE_S:
                    self._note()
                    self._keep_pace()
        finally:
            if self._ring.close.alive:  # not when Python ends, which has closed it
                self._note()
                self._ring.close()

    def _ask(self) -> int | None:
        """Return the slot of the next batch; None for one that could not be gathered."""
        until_s = 0.0
        while (slot := self._ring.next()) == NOT_YET:
            until_s = until_s or time.monotonic() + self._timeout_s
            if time.monotonic() > until_s:
                raise DataError(f"the dataset has delivered nothing for {self._timeout_s:g} s (timeout_s).")
        return None if slot == FAILED else slot

    def _permutation(self, epoch: int) -> Permutation:
        return Permutation(self._order.num_samples, seed=self._order.seed, epoch=epoch)

    def _tell_keys(self, epoch: int) -> None:
        if self._order.is_shuffled:
            self._ring.set_keys(epoch, self._permutation(epoch).keys)

    def _keep_pace(self) -> None:
        """Have as much gathered ahead as the pace says now."""
        ahead = min(MOST_AHEAD, self._pace.ahead if self._prefetch is None else self._prefetch)
        if ahead == self._ahead:
            return
        self._ahead = ahead
        while len(self._slots) < ahead + 1:
            self._add_slot()
        self._ring.set_pace(
            ahead=ahead,
            threads=max(1, self._threads - 1) if ahead else 0,
            does_help=self._threads > 1 or not ahead,
        )

    def _add_slot(self) -> None:
        tensors = [torch.empty((max(self._counts), *each.shape), dtype=each.stored) for each in self._columns]
        self._ring.add_slot([tensor.numpy() for tensor in tensors])
        named = {each.name: tensor.view(each.dtype) for each, tensor in zip(self._columns, tensors, strict=True)}
        whole, last = ({name: tensor[:count] for name, tensor in named.items()} for count in self._counts)
        self._slots.append((whole, last))

    def _note(self) -> None:
        """Tell the pace what loading has cost since it was told last."""
        if not self._batches:
            return
        then_s, waited_then_s, load_then_s = self._noted
        now_s, (waited_s, load_s) = time.perf_counter(), self._ring.times_s()
        waited = waited_s - waited_then_s
        self._pace.note(
            batches=self._batches,
            chunks=self._batches,
            waited_s=waited,
            used_s=max(0.0, now_s - then_s - waited),
            load_s=load_s - load_then_s,
        )
        self._noted, self._batches = (now_s, waited_s, load_s), 0


def _part(schedule: Schedule, step: int) -> tuple[int, int]:
    """Return this worker's positions in the batch of a step of epoch 0, counted from the batch's first."""
    (first, last), start = schedule.part(step), schedule.where(step).first
    return first - start, last - start

"""What a training run loads: each step's part of the global batch, for one worker."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from shoal.data.loading.chunk import Loaded, Reader, chunk_loader
from shoal.data.loading.dataset import DatasetReader
from shoal.data.loading.device import Sender
from shoal.data.loading.feed import Feed
from shoal.data.loading.pace import Pace, Report
from shoal.data.loading.slot import Slot
from shoal.data.loading.tables import expect
from shoal.data.order import Order
from shoal.data.partition import Schedule
from shoal.data.view import View


@dataclass(frozen=True)
class Part:
    """One worker's part of one global batch."""

    step: int
    """Which step it is for, from 1."""
    epoch: int
    samples: tuple[int, ...]
    """The numbers of its samples in the dataset."""
    batch_samples: int
    """How many samples the global batch has."""
    batch: Any
    """The samples, collated. Of an empty part, as a last, partial batch may leave it, a stand-in of one sample.
    Of a pack, its memory is filled again when the next part is asked for."""
    index: int = 0
    """Which part of the global batch it is."""


class StepLoader:
    """Iterates over the parts of worker `index`, from step `first_step` to `last_step`.

    Threads load them: when they are asked for, and once that takes a noticeable time of the worker's, ahead (pace.py).
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int,
        shares: Sequence[float],
        index: int,
        last_step: int,
        first_step: int = 1,
        seed: int = 0,
        shuffle: bool = True,
        block_rows: int | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        device: torch.device | None = None,
        is_ahead: bool = False,
        threads: int | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        reader: Reader
        if isinstance(data, View) and collate is None:
            reader, count = data, threads or default_threads()
        else:
            reader, count = DatasetReader(data, collate=collate, index=index), 1
        # A dataset's batches are the user's own tensors: they go to the device as the training step sends them.
        self._sender = Sender(device if isinstance(reader, View) else None)
        order = Order(reader.num_samples, seed=seed, is_shuffled=shuffle, block_rows=block_rows)
        if isinstance(reader, View):
            expect(reader.pack, order)
        self._reader, self._order, self._batch_size, self._last_step = reader, order, batch_size, last_step
        self._threads, self._timeout_s, self._index = count, timeout_s, index
        self._pace = Pace(threads=count, is_ahead=is_ahead, at_first=max(2, count))
        self.go_on(first_step, shares)

    def go_on(self, first_step: int, shares: Sequence[float]) -> None:
        """Have the next iteration begin with `first_step`, and load this worker's part by other `shares`."""
        self._schedule = Schedule(
            self._reader.num_samples, self._batch_size, shares=tuple(shares), index=self._index, has_stand_ins=True
        )
        self._load = self._sender.sending(chunk_loader(self._reader, self._schedule, self._order))
        self._steps = first_step - 1, self._last_step
        self._at_once = self._reader.batches_at_once(self._schedule.part_samples)

    def __iter__(self) -> Generator[Part, None, None]:
        """Yield the parts in order, loaded by threads that end with the iteration."""
        feed = Feed(
            self._schedule.chunks(*self._steps, at_once=self._at_once),
            self._load,
            threads=self._threads,
            pace=self._pace,
            new_slot=self.new_slot,
            timeout_s=self._timeout_s,
            who=f" to worker {self._index}",
        )
        with closing(feed.chunks()) as chunks:
            for loaded in chunks:
                yield from self._parts(loaded)

    def _parts(self, loaded: Loaded) -> Iterator[Part]:
        chunk = loaded.chunk
        bounds = pairwise([0, *accumulate(chunk.sizes)])
        for step, (first, last), batch in zip(chunk.steps, bounds, self._sender.receive(loaded), strict=True):
            begin, end = self._schedule.part(step)
            samples = tuple(chunk.samples[first:last].tolist()) if end > begin else ()
            yield Part(step + 1, chunk.epoch, samples, self._schedule.where(step).num_samples, batch, self._index)

    def load(self, step: int, slot: Slot) -> Loaded:
        """Return the part of one step, from 1, for `receive`; its memory is the slot's. Called by any one thread."""
        slot.wait()
        return self._load(range(step - 1, step), slot)

    def receive(self, loaded: Loaded) -> Part:
        """Return the part that `load` has loaded, ready to be computed with. Called by the thread that computes."""
        return next(self._parts(loaded))

    def new_slot(self) -> Slot:
        """Return memory for a part."""
        return Slot(pin=self._sender.is_needed)

    def report(self) -> Report:
        """Return what loading has cost so far."""
        return self._pace.report()


def default_threads() -> int:
    """Return how many threads load where nobody says: as many as this worker computes with, up to 8."""
    return max(1, min(8, torch.get_num_threads()))

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
from shoal.data.loading.patience import Check, Patience, never
from shoal.data.loading.processes import ProcessFeed
from shoal.data.loading.slot import Slot
from shoal.data.loading.tables import expect
from shoal.data.order import Order
from shoal.data.partition import Schedule
from shoal.data.sampled import SampledOrder
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
    Of a pack, and from processes, its memory is filled again when the next part is asked for."""
    index: int = 0
    """Which part of the global batch it is."""


class StepLoader:
    """Iterates over the parts of worker `index`, from step `first_step` to `last_step`.

    Threads load them: when they are asked for, and once that takes a noticeable time of the worker's, ahead (pace.py).
    Or, for datasets and transforms in Python, as many forked processes as `workers`, always ahead (processes.py).
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
        sampler: Any = None,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        device: torch.device | None = None,
        is_ahead: bool = False,
        threads: int | None = None,
        workers: int = 0,
        timeout_s: float = 600.0,
        check: Check = never,
    ) -> None:
        """`check` is called while a part is waited for, and may raise."""
        reader: Reader
        if isinstance(data, View) and collate is None:
            reader, count = data, workers or threads or default_threads()
        else:
            arriving = data.arriving if isinstance(data, View) else None
            reader = DatasetReader(data, collate=collate, index=index, arriving=arriving)
            count = workers or threads or 1
        # A dataset's batches are the user's own tensors: they go to the device as the training step sends them.
        self._sender = Sender(device if isinstance(reader, View) else None)
        order: Order | SampledOrder
        if sampler is not None:
            order = SampledOrder(sampler, num_samples=reader.num_samples, seed=seed)
        else:
            order = Order(reader.num_samples, seed=seed, is_shuffled=shuffle, block_rows=block_rows)
            if isinstance(reader, View):
                expect(reader.pack, order)
        self._reader, self._order, self._batch_size, self._last_step = reader, order, batch_size, last_step
        self._drop_last = drop_last
        self._threads, self._workers, self._index = count, workers, index
        self.patience = Patience(timeout_s, reader.arriving, check=check)
        self._pace = Pace(threads=count, is_ahead=is_ahead or workers > 0, at_first=max(2, count))
        self.go_on(first_step, shares)

    def go_on(self, first_step: int, shares: Sequence[float]) -> None:
        """Have the next iteration begin with `first_step`, and load this worker's part by other `shares`."""
        self._schedule = Schedule(
            self._order.num_samples,
            self._batch_size,
            shares=tuple(shares),
            index=self._index,
            drop_last=self._drop_last,
            has_stand_ins=True,
        )
        self._read = chunk_loader(self._reader, self._schedule, self._order)
        self._load = self._sender.sending(self._read)
        self._steps = first_step - 1, self._last_step
        self._at_once = self._reader.batches_at_once(self._schedule.part_samples)

    def __iter__(self) -> Generator[Part, None, None]:
        """Yield the parts in order, loaded by threads or processes that end with the iteration."""
        with closing(self._from_processes() if self._workers else self._from_threads()) as chunks:
            for loaded in chunks:
                if not loaded.batches:  # the end of a stream
                    return
                yield from self._parts(loaded)

    def _from_threads(self) -> Generator[Loaded, None, None]:
        return Feed(
            self._work(),
            self._load,
            threads=self._threads,
            pace=self._pace,
            new_slot=self.new_slot,
            patience=self.patience,
            who=f" to worker {self._index}",
        ).chunks()

    def _from_processes(self) -> Generator[Loaded, None, None]:
        feed = ProcessFeed(self._work, self._read, workers=self._workers, pace=self._pace, patience=self.patience)
        with closing(feed.chunks()) as chunks:
            yield from self._sender.send_each(chunks)

    def _work(self) -> Iterator[range]:
        return self._schedule.chunks(*self._steps, at_once=self._at_once)

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

"""A loader to use on its own, in the place of torch's DataLoader.

1. The order of samples is a pure function of (seed, epoch, position); batch b of an epoch is positions
   [b * batch_size, (b + 1) * batch_size), and a worker takes its share of each. So the number of workers, threads or
   processes changes who loads what, never what is loaded, and where a loader stands is two integers.
2. From a pack, some batches are gathered by one call into memory that is used again and again; where nothing but a
   gather is needed, and every part has been mapped, threads of C do it without Python (loading/ring.py). Of other
   datasets, samples are taken one by one and collated.
3. A batch stays as it is until the next one is asked for. Whoever keeps batches for longer says `copy=True`.
"""

import copy
import dataclasses
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import takewhile
from typing import Any

import torch

from shoal.core.errors import ConfigError
from shoal.data.loading.chunk import Load, Loaded, chunk_loader
from shoal.data.loading.crops import ImageOptions
from shoal.data.loading.dataset import DatasetReader
from shoal.data.loading.device import Sender, map_tensors
from shoal.data.loading.feed import Feed
from shoal.data.loading.pace import Pace, Report
from shoal.data.loading.patience import Patience
from shoal.data.loading.processes import ProcessFeed
from shoal.data.loading.ring import GatheredSamples, RingFeed
from shoal.data.loading.slot import Slot
from shoal.data.loading.state import Place, read_state, write_state
from shoal.data.loading.tables import expect
from shoal.data.order import Order
from shoal.data.partition import Schedule
from shoal.data.reading import reader_of
from shoal.data.steps import default_threads
from shoal.data.view import View
from shoal.spec.parts import parts


class Loader:
    """Batches of `data`: a pack (its path, a Pack, a View or a Staged), or any map-style dataset.

    Each iteration is the next epoch; with `epochs`, it is that many in one go. `batch_size` is global: with `shares`,
    this is worker `index`, whose batches are its part of each (an empty one where a last, partial batch leaves it
    nothing; `drop_last` leaves such a batch out).

    The order is that of `Job`: `shuffle`, `seed`, `block_rows`. What of a pack is loaded is that of `View`: `columns`,
    `window`, `stride`, `with_documents`, `pack_documents`, `ragged`, `image`, `transform`; `collate` makes batches of
    the samples of other datasets. `threads` gather and decode (without it, as many as torch computes with, up to 8; 1
    for a dataset in Python); `workers` are processes instead. `prefetch` batches are loaded ahead ("auto": once the
    worker waits for a noticeable time), and go to `device`. A batch from a pack is filled again for the next, unless
    `copy` is True. What does not come within `timeout_s` is an error.
    """

    def __init__(
        self,
        data: Any,
        *,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 0,
        epochs: int = 1,
        drop_last: bool = False,
        shares: Sequence[float] = (1.0,),
        index: int = 0,
        block_rows: int | None = None,
        columns: Sequence[str] | None = None,
        window: int | None = None,
        stride: int | None = None,
        with_documents: bool = False,
        pack_documents: bool = False,
        ragged: str = "list",
        image: ImageOptions | None = None,
        transform: Callable[..., Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        threads: int | None = None,
        workers: int = 0,
        prefetch: int | str = "auto",
        device: torch.device | str | None = None,
        copy: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._reader = reader_of(
            data,
            collate=collate,
            index=index,
            transform=transform,
            columns=columns,
            window=window,
            stride=stride,
            with_documents=with_documents,
            pack_documents=pack_documents,
            ragged=ragged,
            image=image,
        )
        _check_counts(batch_size=batch_size, epochs=epochs, block_rows=block_rows, threads=threads, workers=workers)
        _check(shares=shares, index=index, prefetch=prefetch)
        num_samples = self._reader.num_samples
        self._schedule = Schedule(num_samples, batch_size, shares=tuple(shares), index=index, drop_last=drop_last)
        if self._schedule.steps_per_epoch == 0:
            raise ConfigError(f"{num_samples} samples make no batch of {batch_size}. Leave out drop_last=True.")
        self._order = Order(num_samples, seed=seed, is_shuffled=shuffle, block_rows=block_rows)
        if isinstance(self._reader, View):
            expect(self._reader.pack, self._order)
        self._epochs, self._copy = epochs, copy
        self._patience = Patience(timeout_s, self._reader.arriving)
        self._sender = Sender(device)
        self._workers = workers
        is_dataset = isinstance(self._reader, DatasetReader)
        self._threads = workers or threads or (1 if is_dataset else default_threads())
        self._prefetch = None if isinstance(prefetch, str) else prefetch
        self._set_pace()
        self._step = 0
        """The step of the next batch, over all epochs."""
        self._first_epoch = 0
        """With which this iteration began, or the next one does."""
        self._is_loaded = False

    def _set_pace(self) -> None:
        fixed = self._prefetch
        self._at_once = self._reader.batches_at_once(self._schedule.part_samples)
        self._pace = Pace(
            threads=self._threads,
            prefetch=None if fixed is None else -(-fixed // self._at_once),
            is_ahead=self._sender.is_needed or bool(self._workers),
            at_first=max(2, self._threads),
        )

    def divided(self, shares: Sequence[float], *, index: int, has_stand_ins: bool = False) -> "Loader":
        """Return a loader of the same global batches that gives worker `index` its part by `shares`.

        With `has_stand_ins`, a part without samples is given the first one of its batch. For those who are given a
        loader that knows of no workers: Lightning's strategy, Accelerate's `prepare`.
        """
        if len(self._schedule.shares) > 1:
            raise ConfigError(
                f"the loader is that of worker {self._schedule.index} already: it cannot be divided anew."
            )
        _check(shares=shares, index=index, prefetch=0)
        made = copy.copy(self)
        made._schedule = dataclasses.replace(
            self._schedule, shares=tuple(shares), index=index, has_stand_ins=has_stand_ins
        )
        made._set_pace()
        return made

    @property
    def leaves_nothing(self) -> bool:
        """Whether the last batch of an epoch has no sample for one of the workers."""
        last = self._schedule.where(self._schedule.steps_per_epoch - 1)
        return 0 in parts(last.num_samples, self._schedule.shares)

    def given(self) -> tuple[tuple[int, ...], int, int]:
        """Return of the batch given last: the samples' numbers in the data, how many count, and how many all have."""
        step = self._step - 1
        where, (first, last) = self._schedule.where(step), self._schedule.part(step)
        positions, _ = self._schedule.positions(range(step, step + 1))
        samples = self._order.samples(positions, epoch=where.epoch)
        return tuple(samples.tolist()), last - first, where.num_samples

    def __len__(self) -> int:
        """How many batches a whole iteration has, with those that were given before a state was taken."""
        return self._schedule.steps_per_epoch * self._epochs

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._step // self._schedule.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from where a loaded state stood, or else of the next `epochs`."""
        per_epoch = self._schedule.steps_per_epoch
        if not self._is_loaded:
            self._step = -(-self._step // per_epoch) * per_epoch  # what is left of an epoch that was broken off
        if not self._is_loaded or self._step > (self._first_epoch + self._epochs) * per_epoch:
            self._first_epoch = self._step // per_epoch
        self._is_loaded = False
        return self._batches(self._step, (self._first_epoch + self._epochs) * per_epoch)

    def _batches(self, first: int, last: int) -> Iterator[Any]:
        given = first
        if self._gathered() is None:
            with closing(self._chunks(first, last)) as chunks:
                for loaded in chunks:
                    for step, batch in zip(loaded.chunk.steps, self._sender.receive(loaded), strict=True):
                        self._step = given = step + 1  # before it is given: a state that is asked for counts it
                        yield batch
        if given < last:
            with closing(self._from_ring(range(given, last))) as batches:
                for batch in batches:
                    self._step = given = given + 1
                    yield batch
        self._first_epoch = self.epoch

    def _gathered(self) -> GatheredSamples | None:
        """Return what threads of C gather batches from; None while, or where, Python has a part in each."""
        stands_in = self._schedule.has_stand_ins and self.leaves_nothing
        is_plain = not (self._workers or self._copy or self._sender.is_needed or self._order.block_rows or stands_in)
        if not (is_plain and isinstance(self._reader, View) and self._reader.is_gathered):
            return None
        return self._reader.gathered()

    def _before_ring(self, chunks: Iterator[range]) -> Iterator[range]:
        """Yield chunks as long as there are parts that nobody has mapped yet."""
        return takewhile(lambda _: self._gathered() is None, chunks)

    def _from_ring(self, steps: range) -> Generator[Any, None, None]:
        samples = self._gathered()
        assert samples is not None
        return RingFeed(
            samples,
            steps,
            chunk_loader(self._reader, self._schedule, self._order),
            schedule=self._schedule,
            order=self._order,
            threads=self._threads,
            prefetch=self._prefetch,
            pace=self._pace,
            timeout_s=self._patience.timeout_s,
        ).batches()

    def _chunks(self, first: int, last: int) -> Generator[Loaded, None, None]:
        load = chunk_loader(self._reader, self._schedule, self._order)
        if self._workers:
            return self._from_processes(first, last, load)
        return Feed(
            self._before_ring(self._schedule.chunks(first, last, at_once=self._at_once)),
            self._sender.sending(load),
            threads=self._threads,
            pace=self._pace,
            new_slot=lambda: Slot(pin=self._sender.is_needed),
            reuse=not self._copy,
            patience=self._patience,
        ).chunks()

    def _from_processes(self, first: int, last: int, load: Load) -> Generator[Loaded, None, None]:
        feed = ProcessFeed(
            lambda: self._schedule.chunks(first, last, at_once=self._at_once),
            load,
            workers=self._workers,
            pace=self._pace,
            patience=self._patience,
        )
        with closing(feed.chunks()) as chunks:
            for loaded in self._sender.send_each(chunks):
                if self._copy and not self._sender.is_needed:
                    yield Loaded(loaded.chunk, [map_tensors(torch.clone, batch) for batch in loaded.batches])
                else:
                    yield loaded

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: after the batch that it gave last."""
        return write_state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, in the next iteration, behind the batch after which `state` was taken: by any number of workers.

        The iteration ends with the last of its `epochs`, counted from where the one began in which the state was taken:
        after a state of its last batch there is nothing left of it. One that was taken at its end begins the next.
        """
        self._step, self._first_epoch = read_state(state, self._place)
        self._is_loaded = True

    @property
    def _place(self) -> Place:
        return Place(self._step, self._first_epoch, self._schedule, self._order)

    def report(self) -> Report:
        """Return what loading cost so far; as a str, whether it was the bottleneck."""
        return self._pace.report()


def _check_counts(*, workers: int, **counts: int | None) -> None:
    """Refuse what is no count; `None` is for whatever is right."""
    for name, value, least in (*((name, value, 1) for name, value in counts.items()), ("workers", workers, 0)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise ConfigError(f"Loader({name}={value!r}) must be a whole number of at least {least}.")


def _check(*, shares: Sequence[float], index: int, prefetch: Any) -> None:
    if not 0 <= index < len(shares) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ConfigError(f"Loader(index={index}, shares={tuple(shares)}): shares are fractions of 1, one a worker.")
    if prefetch != "auto" and (not isinstance(prefetch, int) or prefetch < 0):
        raise ConfigError(f"Loader(prefetch={prefetch!r}) must be 'auto' or how many batches to load ahead.")

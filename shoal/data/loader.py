"""A loader to use on its own, in the place of torch's DataLoader.

1. The order of samples is a pure function of (seed, epoch, position); batch b of an epoch is positions
   [b * batch_size, (b + 1) * batch_size), and a worker takes its share of each. So the number of workers, threads or
   processes changes who loads what, never what is loaded, and where a loader stands is two integers.
2. From a pack, some batches are gathered by one call into memory that is used again and again; where nothing but a
   gather is needed, and every part has been mapped, threads of C do it without Python (loading/ring.py). Of other
   datasets, samples are taken one by one and collated.
3. A batch stays as it is until the next one is asked for. Whoever keeps batches for longer says `copy=True`.
"""

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import takewhile
from typing import Any

import torch

from shoal.core.errors import ConfigError
from shoal.data.loading.chunk import Load, Loaded, Reader, chunk_loader
from shoal.data.loading.crops import ImageOptions
from shoal.data.loading.dataset import DatasetReader
from shoal.data.loading.device import Sender, map_tensors
from shoal.data.loading.feed import Feed
from shoal.data.loading.pace import Pace, Report
from shoal.data.loading.processes import ProcessFeed
from shoal.data.loading.ring import GatheredSamples, RingFeed
from shoal.data.loading.slot import Slot
from shoal.data.loading.state import Place, read_state, write_state
from shoal.data.loading.tables import expect
from shoal.data.loading.transform import Transform
from shoal.data.order import Order
from shoal.data.pack.reader import Pack
from shoal.data.partition import Schedule
from shoal.data.stage.staged import Staged
from shoal.data.steps import default_threads
from shoal.data.view import View


class Loader:
    """Batches of `data`: a pack (its path, a Pack, a View or a Staged), or any map-style dataset.

    Each iteration is the next epoch; with `epochs`, it is that many in one go. `batch_size` is global: with `shares`,
    this is worker `index`, whose batches are its part of each (an empty one where a last, partial batch leaves it
    nothing).
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
        self._reader = _reader(
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
        _check(batch_size=batch_size, epochs=epochs, shares=shares, index=index, prefetch=prefetch, workers=workers)
        num_samples = self._reader.num_samples
        self._schedule = Schedule(num_samples, batch_size, shares=tuple(shares), index=index, drop_last=drop_last)
        if self._schedule.steps_per_epoch == 0:
            raise ConfigError(f"{num_samples} samples make no batch of {batch_size}. Leave out drop_last=True.")
        self._order = Order(num_samples, seed=seed, is_shuffled=shuffle, block_rows=block_rows)
        if isinstance(self._reader, View):
            expect(self._reader.pack, self._order)
        self._epochs, self._timeout_s, self._copy = epochs, timeout_s, copy
        self._sender = Sender(device)
        self._workers = workers
        is_dataset = isinstance(self._reader, DatasetReader)
        self._threads = workers or threads or (1 if is_dataset else default_threads())
        self._prefetch = fixed = None if isinstance(prefetch, str) else prefetch
        self._at_once = self._reader.batches_at_once(self._schedule.part_samples)
        self._pace = Pace(
            threads=self._threads,
            prefetch=None if fixed is None else -(-fixed // self._at_once),
            is_ahead=self._sender.is_needed or bool(workers),
            at_first=max(2, self._threads),
        )
        self._step = 0
        """The step of the next batch, over all epochs."""
        self._is_loaded = False

    def __len__(self) -> int:
        """How many batches a whole iteration has."""
        return self._schedule.steps_per_epoch * self._epochs

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, from 0."""
        return self._step // self._schedule.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches from where a loaded state stood, or else of the next epoch."""
        per_epoch = self._schedule.steps_per_epoch
        if not self._is_loaded:
            self._step = -(-self._step // per_epoch) * per_epoch  # what is left of an epoch that was broken off
        self._is_loaded = False
        first = self._step
        return self._batches(first, (first // per_epoch + self._epochs) * per_epoch)

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

    def _gathered(self) -> GatheredSamples | None:
        """Return what threads of C gather batches from; None while, or where, Python has a part in each."""
        is_plain = not (self._workers or self._copy or self._sender.is_needed or self._order.block_rows)
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
            timeout_s=self._timeout_s,
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
            timeout_s=self._timeout_s,
        ).chunks()

    def _from_processes(self, first: int, last: int, load: Load) -> Generator[Loaded, None, None]:
        feed = ProcessFeed(
            lambda: self._schedule.chunks(first, last, at_once=self._at_once),
            load,
            workers=self._workers,
            pace=self._pace,
            timeout_s=self._timeout_s,
        )
        with closing(feed.chunks()) as chunks:
            for loaded in chunks:
                slot = Slot()
                sent = self._sender.send(loaded, slot)
                if self._copy and sent is loaded:
                    sent = Loaded(loaded.chunk, [map_tensors(torch.clone, batch) for batch in loaded.batches])
                yield sent
                slot.wait()  # before the process fills that memory again

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands: after the batch that it gave last."""
        return write_state(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on, in the next iteration, behind the batch after which `state` was taken: by any number of workers.

        A state from the end of an epoch goes on with the next.
        """
        self._step = read_state(state, self._place)
        self._is_loaded = True

    @property
    def _place(self) -> Place:
        return Place(self._step, self._schedule, self._order)

    def report(self) -> Report:
        """Return what loading cost so far; as a str, whether it was the bottleneck."""
        return self._pace.report()


def _reader(
    data: Any,
    *,
    collate: Callable[[list[Any]], Any] | None,
    index: int,
    transform: Callable[..., Any] | None,
    **options: Any,
) -> Reader:
    """Return what reads `data`: its own way for packs, sample by sample for the rest."""
    is_pack = isinstance(data, (str, os.PathLike, Pack, Staged))
    if is_pack and collate is None:
        return View(data, transform=transform, **options)
    if isinstance(data, View) and collate is None and transform is not None:
        return data.transformed(transform)
    asked = [name for name, value in options.items() if value not in (None, False, "list")]
    if asked and not is_pack:
        raise ConfigError(f"Loader({', '.join(asked)}=...) is for the path of a pack, not for {type(data).__name__}.")
    if isinstance(data, View) and collate is None:
        return data
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or isinstance(data, dict):
        raise ConfigError(f"Loader needs a pack or a dataset with len() and [index], not {type(data).__name__}.")
    samples = View(data, **options) if is_pack else data
    if len(samples) == 0:
        raise ConfigError("the dataset is empty: there is nothing to load.")
    return DatasetReader(samples, collate=collate, finish=Transform(transform) if transform else None, index=index)


def _check(*, batch_size: int, epochs: int, shares: Sequence[float], index: int, prefetch: Any, workers: int) -> None:
    for name, value, least in (("batch_size", batch_size, 1), ("epochs", epochs, 1), ("workers", workers, 0)):
        if not isinstance(value, int) or value < least:
            raise ConfigError(f"Loader({name}={value!r}) must be a whole number of at least {least}.")
    if not 0 <= index < len(shares) or min(shares) < 0 or abs(sum(shares) - 1) > 1e-6:
        raise ConfigError(f"Loader(index={index}, shares={tuple(shares)}): shares are fractions of 1, one a worker.")
    if prefetch != "auto" and (not isinstance(prefetch, int) or prefetch < 0):
        raise ConfigError(f"Loader(prefetch={prefetch!r}) must be 'auto' or how many batches to load ahead.")

"""A loader over any map-style dataset: each step's part of the global batch, loaded ahead in the background."""

import queue
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from shoal.core.errors import DataError
from shoal.data.order import Indices, order
from shoal.data.partition import global_batch
from shoal.spec.parts import cut

_BLOCK = 4096
_NOTICEABLE = 0.05


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
    """The samples, collated. Of an empty part, as a last, partial batch may leave it, a stand-in of one sample."""


@dataclass(frozen=True)
class _Block:
    """The samples at the positions of an epoch from `first` on."""

    epoch: int
    first: int
    samples: Indices


class Loader:
    """Iterates over the parts of worker `index`, from step `first_step` to `last_step`.

    A thread loads them. At first it loads each part when it is asked for; once that takes a noticeable time of the
    worker's, it loads `ahead` parts in advance. Not from the start, because a thread that runs beside the worker on
    cores that are all busy costs more than it brings where loading is cheap: 3 to 5% of a step of 15 ms, with 2 workers
    on 2 cores (2026-11), since every delay of one worker is waited for by all.
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
        collate: Callable[[list[Any]], Any] | None = None,
        ahead: int = 2,
        is_ahead: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self._data = data
        self._batch_size = batch_size
        self._shares = shares
        self._index = index
        self._steps = range(first_step, last_step + 1)
        self._seed = seed
        self._shuffle = shuffle
        self._collate = collate or default_collate
        self._ahead = ahead
        self._timeout_s = timeout_s
        self._block: _Block | None = None
        self._is_ahead = is_ahead
        self._slow_parts = 0
        self._wanted = threading.Event()

    def __iter__(self) -> Iterator[Part]:
        """Yield the parts in order, loaded by a thread that ends with the iteration."""
        parts: queue.Queue[Part | BaseException | None] = queue.Queue(maxsize=self._ahead)
        stop = threading.Event()
        thread = threading.Thread(target=self._fill, args=(parts, stop), name="shoal-loader", daemon=True)
        thread.start()
        try:
            asked = time.perf_counter()
            while (part := self._next(parts)) is not None:
                if isinstance(part, BaseException):
                    raise part
                given = time.perf_counter()
                yield part
                self._decide(waited_s=given - asked, used_s=time.perf_counter() - given)
                asked = time.perf_counter()
        finally:
            stop.set()
            self._wanted.set()
            _drain(parts)
            thread.join(timeout=10)  # a dataset stuck in I/O must not keep the worker from ending

    def _decide(self, *, waited_s: float, used_s: float) -> None:
        """Load ahead from now on if the worker has waited for a noticeable part of its time, three times in a row."""
        self._slow_parts = self._slow_parts + 1 if waited_s > _NOTICEABLE * used_s else 0
        self._is_ahead = self._is_ahead or self._slow_parts >= 3

    def _next(self, parts: "queue.Queue[Part | BaseException | None]") -> Part | BaseException | None:
        self._wanted.set()
        try:
            return parts.get(timeout=self._timeout_s)
        except queue.Empty:
            raise DataError(
                f"the dataset has delivered nothing to worker {self._index} for {self._timeout_s:g} s (timeout_s)."
            ) from None

    def _fill(self, parts: "queue.Queue[Part | BaseException | None]", stop: threading.Event) -> None:
        loading = self._load()
        try:
            while not stop.is_set():
                if not self._is_ahead and not self._wanted.wait(timeout=1.0):
                    continue
                self._wanted.clear()
                part = next(loading, None)
                if not _put(parts, part, stop) or part is None:
                    return
        except BaseException as error:  # whatever it is, it belongs to the worker, not to this thread
            _put(parts, error, stop)

    def _load(self) -> Iterator[Part]:
        for step in self._steps:
            where = global_batch(step - 1, num_samples=len(self._data), batch_size=self._batch_size)
            bounds = cut(where.num_samples, self._shares)
            first, last = where.first + bounds[self._index], where.first + bounds[self._index + 1]
            samples = self._order(where.epoch, first, last)
            # Workers wait for each other in every step, so that one without samples computes on a stand-in.
            batch = self._fetch(samples or self._order(where.epoch, where.first, where.first + 1), step)
            yield Part(step, where.epoch, tuple(samples), where.num_samples, batch)

    def _order(self, epoch: int, first: int, last: int) -> list[int]:
        """Return the samples at positions [first, last): looked up in a block that is computed at once.

        A call into NumPy costs the same for one position and for a thousand (0.1 ms).
        """
        if not self._shuffle:
            return list(range(first, last))
        block = self._block
        if (
            block is None
            or block.epoch != epoch
            or not block.first <= first <= last <= block.first + len(block.samples)
        ):
            end = min(first + max(_BLOCK, last - first), len(self._data))
            positions = np.arange(first, end, dtype=np.int64)
            block = _Block(epoch, first, order(len(self._data), positions, seed=self._seed, epoch=epoch))
            self._block = block
        samples: list[int] = block.samples[first - block.first : last - block.first].tolist()
        return samples

    def _fetch(self, samples: list[int], step: int) -> Any:
        if hasattr(self._data, "__getitems__"):
            items = self._guarded(self._data.__getitems__, samples, _listed(samples), step)
        else:
            items = [self._guarded(self._data.__getitem__, i, f"sample {i}", step) for i in samples]
        return self._guarded(self._collate, items, f"the batch of {_listed(samples)}", step)

    def _guarded(self, load: Callable[[Any], Any], argument: Any, what: str, step: int) -> Any:
        try:
            return load(argument)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"{what} cannot be loaded for step {step} on worker {self._index}: "
                f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})."
            ) from error


def _put(parts: "queue.Queue[Any]", item: Any, stop: threading.Event) -> bool:
    """Put `item` and return True, or return False when the iteration has ended meanwhile."""
    while not stop.is_set():
        try:
            parts.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _drain(parts: "queue.Queue[Any]") -> None:
    while not parts.empty():
        parts.get_nowait()


def _listed(samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:8]))
    return f"samples {shown}" + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")

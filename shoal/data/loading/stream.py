"""The global batches of a stream, by their step."""

import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from shoal.core.errors import DataError
from shoal.data.stream import Stream


@dataclass(frozen=True)
class StreamBatch:
    """One global batch."""

    epoch: int
    first: int
    """The position of its first sample in the epoch."""
    samples: list[Any]


class StreamReader:
    """Reads ahead of nobody: a step that lies ahead is read up to, one that lies behind has the stream read again.

    Batches are kept from the step on that `release` has named last.
    """

    def __init__(
        self, stream: Stream, *, batch_size: int, drop_last: bool = False, is_one_epoch: bool = False, index: int = 0
    ) -> None:
        self._stream, self._batch_size, self._drop_last = stream, batch_size, drop_last
        self._is_one_epoch, self._index = is_one_epoch, index
        self._kept: dict[int, StreamBatch] = {}
        self._kept_from = 0
        self._lock = threading.Lock()
        self._begin = 0, 0
        self._begin_again()

    def start_at(self, *, epoch: int, step: int) -> None:
        """Begin with `epoch`, whose first step is known to be `step`, from 0; not with the first epoch."""
        with self._lock:
            self._begin = epoch, step
            self._begin_again()

    def batch(self, step: int) -> StreamBatch | None:
        """Return the global batch of `step`, from 0; None behind the end, where only one epoch is read."""
        with self._lock:
            self._kept = {number: batch for number, batch in self._kept.items() if number >= self._kept_from}
            if step < self._next and step not in self._kept:
                self._begin_again()
            while self._next <= step:
                found = self._read()
                if found is None:
                    return None
                if self._next >= self._kept_from:
                    self._kept[self._next] = found
                self._next += 1
            return self._kept[step]

    def release(self, step: int) -> None:
        """Forget what was before `step`, when the next batch is asked for. Waits for no reading."""
        self._kept_from = step

    def _begin_again(self) -> None:
        self._epoch, self._next = self._begin
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self._kept = {}

    def _read(self) -> StreamBatch | None:
        samples = self._take()
        while len(samples) < (self._batch_size if self._drop_last else 1):
            if not self._position:
                raise DataError(self._nothing(len(samples)))
            if self._is_one_epoch:
                return None
            self._epoch, self._iterator, self._position = self._epoch + 1, None, 0
            samples = self._take()
        batch = StreamBatch(self._epoch, self._position, samples)
        self._position += len(samples)
        return batch

    def _take(self) -> list[Any]:
        try:
            if self._iterator is None:
                self._iterator = self._stream.epoch(self._epoch)
            return list(islice(self._iterator, self._batch_size))
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"the stream fails after sample {self._position} of epoch {self._epoch} on worker {self._index}, for "
                f"step {self._next + 1}: {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})."
            ) from error

    def _nothing(self, count: int) -> str:
        if count:
            return f"the stream has {count} samples, and with drop_last that makes no batch of {self._batch_size}."
        if not self._epoch:
            return "the stream has no samples: there is nothing to train on."
        return (
            f"the stream gave nothing in epoch {self._epoch}: it can be read only once, and step {self._next + 1} is "
            "beyond its end. Train for fewer steps, or give Job.data something that iter() begins anew."
        )

"""What a training run loads of a stream: each step's part of the global batch, for one worker."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from shoal.data.loading.chunk import Chunk, Loaded
from shoal.data.loading.dataset import guarded
from shoal.data.loading.device import Sender
from shoal.data.loading.pace import Pace
from shoal.data.loading.patience import Check, Patience, never
from shoal.data.loading.slot import Slot
from shoal.data.loading.stream import StreamBatch, StreamReader
from shoal.data.steps import Part, StepLoader
from shoal.data.stream import Stream
from shoal.spec.call import plain
from shoal.spec.parts import cut


class StreamLoader(StepLoader):
    """Like a StepLoader, of a stream: one thread reads it, and all of it.

    Without `last_step`, it is read for one epoch. `place` is where another loader was, to begin with its epoch.
    """

    def __init__(
        self,
        data: Stream,
        *,
        batch_size: int,
        shares: Sequence[float],
        index: int,
        last_step: int | None,
        first_step: int = 1,
        place: dict[str, int] | None = None,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        is_ahead: bool = False,
        timeout_s: float = 600.0,
        check: Check = never,
    ) -> None:
        self._stream = StreamReader(
            data, batch_size=batch_size, drop_last=drop_last, is_one_epoch=last_step is None, index=index
        )
        self._batch_size, self._final, self._collate = batch_size, last_step, collate or default_collate
        self._sender = Sender(None)
        self._threads, self._workers, self._index = 1, 0, index
        self.patience = Patience(timeout_s, check=check)
        self._pace = Pace(threads=1, is_ahead=is_ahead, at_first=2)
        self._load = self._load_part
        self._found: dict[int, StreamBatch] = {}
        self.place: dict[str, int] | None = None
        """Of the part that was given last: its epoch, and how many steps were done before that."""
        if place is not None and place["step"] < first_step:
            self._stream.start_at(epoch=place["epoch"], step=place["step"])
        self.go_on(first_step, shares)

    def go_on(self, first_step: int, shares: Sequence[float]) -> None:
        """Have the next iteration begin with `first_step`, and load this worker's part by other `shares`."""
        self._first, self._shares = first_step - 1, tuple(shares)
        self._stream.release(self._first)

    def load(self, step: int, slot: Slot) -> Loaded:
        """Return the part of one step, from 1; nothing before it will be asked for."""
        self._stream.release(step - 1)
        return super().load(step, slot)

    def _work(self) -> Iterator[range]:
        steps = count(self._first) if self._final is None else range(self._first, self._final)
        return (range(step, step + 1) for step in steps)

    def _load_part(self, steps: range, slot: Slot) -> Loaded:  # noqa: ARG002
        step = steps[0]
        batch = self._stream.batch(step)
        if batch is None:
            return Loaded(Chunk(steps, 0, 0, np.arange(0), ()), [])
        self._found[step] = batch
        first, last = self._bounds(batch)
        samples = batch.samples[first:last] or batch.samples[:1]  # a stand-in, where this worker has none
        positions = np.arange(batch.first + first, batch.first + last)
        what = f"the batch of samples {batch.first + first} to {batch.first + last - 1} of the stream"
        made = plain(guarded(self._collate, samples, what, step + 1, self._index))
        return Loaded(Chunk(steps, batch.epoch, 0, positions, (len(samples),)), [made])

    def _bounds(self, batch: StreamBatch) -> tuple[int, int]:
        bounds = cut(len(batch.samples), self._shares)
        return bounds[self._index], bounds[self._index + 1]

    def _parts(self, loaded: Loaded) -> Iterator[Part]:
        step, samples = loaded.chunk.steps[0], tuple(loaded.chunk.samples.tolist())
        whole = self._found.pop(step)
        self._stream.release(step)
        self.place = {"epoch": whole.epoch, "step": step - whole.first // self._batch_size}
        yield Part(step + 1, whole.epoch, samples, len(whole.samples), loaded.batches[0], self._index)

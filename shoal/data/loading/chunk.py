"""What is loaded at once: consecutive batches of one epoch, so that one call into native code serves all of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from shoal.data.loading.leaves import without_rows
from shoal.data.loading.patience import Arriving
from shoal.data.loading.slot import Slot
from shoal.data.order import Indices, Order
from shoal.data.partition import Schedule
from shoal.data.sampled import SampledOrder


@dataclass(frozen=True)
class Chunk:
    """The samples of one worker in consecutive batches of one epoch."""

    steps: range
    """Which steps they are for, from 0."""
    epoch: int
    seed: int
    samples: Indices
    """The samples of all batches."""
    sizes: tuple[int, ...]
    """How many samples each batch has."""


@dataclass(frozen=True)
class Loaded:
    """A chunk and its batches."""

    chunk: Chunk
    batches: Sequence[Any]
    sent: Any = None
    """The event after which they have arrived on the GPU that they were sent to."""


Load = Callable[[range, Slot], Loaded]


class Reader(Protocol):
    """What makes batches of samples."""

    num_samples: int
    arriving: Arriving | None
    """Of data that is being staged: whether it still arrives."""

    @property
    def makes_empty_batches(self) -> bool:
        """Whether it can be asked for a batch of no samples."""

    def batches_at_once(self, batch_samples: int) -> int:
        """Return how many batches of this size are worth one call."""

    def read(self, chunk: Chunk, slot: Slot) -> Sequence[Any]:
        """Return the batches of `chunk`; what is in the slot is theirs until it is filled again."""


def chunk_loader(reader: Reader, schedule: Schedule, order: Order | SampledOrder) -> Load:
    """Return what loads the batches of some steps: a pure function of them, called by any thread or process."""
    with_stand_ins = replace(schedule, has_stand_ins=True)

    def load(steps: range, slot: Slot) -> Loaded:
        epoch = steps[0] // schedule.steps_per_epoch
        positions, sizes = schedule.positions(steps)
        is_cut = 0 in sizes and not reader.makes_empty_batches
        read_positions, read_sizes = with_stand_ins.positions(steps) if is_cut else (positions, sizes)
        chunk = Chunk(steps, epoch, order.seed, order.samples(read_positions, epoch=epoch), read_sizes)
        batches = reader.read(chunk, slot)
        if is_cut:
            batches = [batch if size else without_rows(batch) for batch, size in zip(batches, sizes, strict=True)]
        return Loaded(chunk, batches)

    return load

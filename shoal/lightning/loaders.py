"""Loaders of Lightning, cut for the workers of a plan: `batch_size` is that of all workers together.

1. An epoch is a list of global batches that does not depend on the workers: the samples as they lie; where the loader
   shuffles, in shoal's order of (seed, epoch); where it has a sampler of its own, in that one's, drawn from the same.
2. Each worker loads its share of each global batch. A last, partial batch that leaves a worker nothing gives it a
   stand-in in training, which counts nothing; in evaluation batches are joined until each worker has a sample, so that
   each is seen exactly once.
3. Where a loader stands is two integers, the epoch and the number of batches: what Lightning's checkpoints hold of it.

Example: 10 samples, batch_size=4, 2 workers: the global batches have 4, 4 and 2 samples, each worker takes 2, 2 and 1.
"""

import copy
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, RandomSampler
from torch.utils.data import SequentialSampler as InOrder

from shoal.core.errors import ConfigError
from shoal.data.loader import Loader
from shoal.data.order import Order
from shoal.data.sampled import seeded
from shoal.spec.parts import cut


@dataclass(frozen=True)
class Taken:
    """What a worker has of a global batch."""

    samples: tuple[int, ...]
    """Their numbers in the dataset; of a stand-in as well."""
    part_samples: int
    """How many of them count: none of a stand-in."""
    batch_samples: int

    @property
    def share(self) -> float:
        """The fraction of the global batch that this part is."""
        return self.part_samples / self.batch_samples


class Epochs:
    """The global batches of a loader, epoch by epoch: the same on every worker."""

    def __init__(self, batch_sampler: Any, *, seed: int) -> None:
        self._batch_sampler, self._seed = batch_sampler, seed
        sampler: Any = getattr(batch_sampler, "sampler", None)
        self._order: Order | None = None
        if type(batch_sampler) is BatchSampler:
            is_shuffled = type(sampler) is RandomSampler and sampler.generator is None and not sampler.replacement
            if (is_shuffled and sampler.num_samples == len(sampler.data_source)) or type(sampler) is InOrder:
                self._order = Order(len(sampler.data_source), seed=seed, is_shuffled=is_shuffled)

    def __len__(self) -> int:
        """How many batches an epoch has."""
        return len(self._batch_sampler)

    def batches(self, epoch: int, first: int) -> Iterator[Sequence[int]]:
        """Yield the samples of each global batch of an epoch, from number `first` on."""
        if self._order is None:
            yield from self._drawn(epoch)[first:]
            return
        size, total = self._batch_sampler.batch_size, self._order.num_samples
        for number in range(first, len(self)):
            positions = np.arange(number * size, min((number + 1) * size, total), dtype=np.int64)
            yield self._order.samples(positions, epoch=epoch).tolist()

    def sizes(self) -> list[int]:
        """Return how many samples each batch of an epoch has, without drawing what cannot be drawn again."""
        sampler: Any = getattr(self._batch_sampler, "sampler", None)
        size: int | None = getattr(self._batch_sampler, "batch_size", None)
        if size is None or not hasattr(sampler, "__len__"):
            return [len(batch) for batch in self._drawn(0)]
        *full, last = [size] * len(self) or [0]
        return [*full, min(last, len(sampler) - len(full) * size)]

    def _drawn(self, epoch: int) -> list[list[int]]:
        """Return the batches of a sampler of the user's own; what it draws from a generator of torch is made ours."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed((self._seed << 20) + epoch)
            return [list(batch) for batch in seeded(self._batch_sampler, self._seed, epoch)]


class _Parts:
    """The batch sampler of one worker: its part of each global batch."""

    def __init__(
        self, epochs: Epochs, *, shares: Sequence[float], index: int, epoch: int, trains: Callable[[], bool]
    ) -> None:
        self.epochs, self._shares, self._index, self._trains = epochs, tuple(shares), index, trains
        self.epoch, self.first = epoch, 0
        self.taken: deque[Taken] = deque()
        self._known: dict[int, bool] = {}

    @property
    def sampler(self) -> "_Parts":
        """Itself: here Lightning looks for what is told the epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Give the batches of this epoch next, from its begin; where it is at that already, from where it stands."""
        if epoch != self.epoch:
            self.epoch, self.first = epoch, 0

    def __len__(self) -> int:
        return len(self.epochs) if self._trains() else self._evaluated

    def __iter__(self) -> Iterator[list[int]]:
        self.taken.clear()
        batches = self.epochs.batches(self.epoch, self.first)
        for batch in batches if self._trains() else self._joined(batches):
            bounds = cut(len(batch), self._shares)
            own = list(batch[bounds[self._index] : bounds[self._index + 1]])
            samples = own or list(batch[:1])
            self.taken.append(Taken(tuple(samples), len(own), len(batch)))
            yield samples

    @cached_property
    def _evaluated(self) -> int:
        """How many batches an evaluation has."""
        joined, held = 0, 0
        for size in self.epochs.sizes():
            held += size
            if self._suffices(held):
                joined, held = joined + 1, 0
        return max(joined, int(held > 0))  # too few for all workers: that is said when they are asked for

    def _suffices(self, samples: int) -> bool:
        if samples not in self._known:
            bounds = cut(samples, self._shares)
            self._known[samples] = all(first < last for first, last in itertools.pairwise(bounds))
        return self._known[samples]

    def _joined(self, batches: Iterator[Sequence[int]]) -> Iterator[Sequence[int]]:
        """Yield batches of which every worker has a part: some joined, where one alone would not do."""
        whole: list[int] = []
        rest: list[int] = []
        for batch in batches:
            rest += batch
            if self._suffices(len(rest)):
                if whole:
                    yield whole
                whole, rest = rest, []
        whole += rest
        if whole and not self._suffices(len(whole)):
            raise ConfigError(
                f"{len(whole)} samples to evaluate on cannot be divided among {len(self._shares)} workers, each with "
                "one at least. Evaluate with fewer workers, or on more samples."
            )
        if whole:
            yield whole


class CutLoader:
    """A DataLoader of which a worker gets its part of each global batch; `taken` is what it has of the one at hand."""

    def __init__(self, loader: DataLoader[Any], parts: _Parts) -> None:
        self._loader, self._parts = copy.copy(loader), parts
        # DataLoader allows no other batch sampler once it is made; made anew, a subclass might want other arguments.
        object.__setattr__(self._loader, "batch_sampler", parts)
        self.taken: Taken | None = None
        self._given = 0

    @property
    def dataset(self) -> Any:
        """What it loads from."""
        return self._loader.dataset

    @property
    def batch_sampler(self) -> _Parts:
        """Where Lightning sets the epoch."""
        return self._parts

    @property
    def worker_init_fn(self) -> Any:
        """What the processes that load begin with; Lightning gives them their seeds by it."""
        return self._loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._loader.worker_init_fn = function

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)  # now, not with the first batch: processes that load begin here
        return self._each(batches)

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        self._given = self._parts.first
        for batch in batches:
            self.taken = self._parts.taken.popleft()
            self._given += 1
            yield batch
        self._parts.first = 0

    def state_dict(self) -> dict[str, int]:
        """Return where it stands: after the batch that it gave last."""
        return {"epoch": self._parts.epoch, "batch": self._given}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on behind the batch after which `state` was taken, with any number of workers."""
        epoch, batch = state["epoch"], state["batch"]
        if batch >= len(self._parts.epochs):
            epoch, batch = epoch + 1, 0
        self._parts.epoch, self._parts.first, self._given = epoch, batch, batch


class CutPack:
    """The same for a `shoal.Loader`."""

    def __init__(self, loader: Loader, *, shares: Sequence[float], index: int, trains: Callable[[Any], bool]) -> None:
        self._loader, self._trains = loader.divided(shares, index=index, has_stand_ins=True), trains
        self.taken: Taken | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        if self._loader.leaves_nothing and not self._trains(self):
            raise ConfigError(
                "the last batch to evaluate on has fewer samples than there are workers. Give the loader another "
                "batch_size, so that each worker has a sample of it."
            )
        return self._each(iter(self._loader))

    def _each(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self.taken = Taken(*self._loader.given())
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """See shoal.Loader."""
        return self._loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See shoal.Loader."""
        self._loader.load_state_dict(state)


def cut_loader(
    loader: Any, *, shares: Sequence[float], index: int, seed: int, epoch: int, trains: Callable[[Any], bool]
) -> CutLoader | CutPack:
    """Return `loader` for worker `index` of those with `shares`. `trains` tells whether it is the one trained on."""
    if isinstance(loader, Loader):
        return CutPack(loader, shares=shares, index=index, trains=trains)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        what = "an IterableDataset" if isinstance(loader, DataLoader) else f"what a {type(loader).__name__} gives"
        raise ConfigError(
            f"{what} cannot be divided among workers so that each sample is seen once. Give a DataLoader of a "
            "map-style dataset, or pack it (shoal pack) and give shoal.Loader('NAME.pack', batch_size=...)."
        )
    if loader.batch_sampler is None:
        raise ConfigError("DataLoader(batch_size=None) has no batches to divide. Give it the global batch_size.")
    if isinstance(loader.sampler, DistributedSampler) and loader.sampler.num_replicas > 1:
        raise ConfigError(
            "the DataLoader has a DistributedSampler. Leave it out: ShoalStrategy gives each worker its part of each "
            "batch, and batch_size is that of all workers together."
        )
    made: list[CutLoader] = []
    parts = _Parts(
        Epochs(loader.batch_sampler, seed=seed), shares=shares, index=index, epoch=epoch, trains=lambda: trains(made[0])
    )
    made.append(CutLoader(loader, parts))
    return made[0]

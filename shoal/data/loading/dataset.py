"""Batches of any map-style dataset: its samples, one by one or many at once, and collated."""

import traceback
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from torch.utils.data import default_collate

from shoal.core.errors import DataError
from shoal.data.loading.chunk import Chunk
from shoal.data.loading.patience import Arriving
from shoal.data.loading.slot import Slot
from shoal.spec.call import plain


class DatasetReader:
    """Reads a dataset with `len()` and `[i]`, or `__getitems__([i, ...])` where it has one."""

    def __init__(
        self,
        data: Any,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        finish: Callable[[Any, Chunk, int], Any] | None = None,
        index: int = 0,
        arriving: Arriving | None = None,
    ) -> None:
        self.arriving = arriving
        self._data, self._collate, self._finish, self._index = data, collate or default_collate, finish, index
        self.num_samples = len(data)

    @cached_property
    def makes_empty_batches(self) -> bool:
        """Whether `collate` takes no samples."""
        try:
            self._collate([])
        except Exception:  # torch's own, and most others
            return False
        return True

    def batches_at_once(self, batch_samples: int) -> int:  # noqa: ARG002
        """Return 1: there is a call for every sample anyway."""
        return 1

    def read(self, chunk: Chunk, slot: Slot) -> Sequence[Any]:  # noqa: ARG002
        """Return the batches, each collated."""
        samples, bounds = chunk.samples.tolist(), [0, *accumulate(chunk.sizes)]
        batches = [
            self._fetch(samples[first:last], step + 1)
            for step, (first, last) in zip(chunk.steps, pairwise(bounds), strict=True)
        ]
        if self._finish is None:
            return batches
        return [self._finish(batch, chunk, number) for number, batch in enumerate(batches)]

    def _fetch(self, samples: list[int], step: int) -> Any:
        if hasattr(self._data, "__getitems__"):
            items = self._guarded(self._data.__getitems__, samples, _listed(samples), step)
        else:
            items = [self._guarded(self._data.__getitem__, i, f"sample {i}", step) for i in samples]
        return plain(self._guarded(self._collate, items, f"the batch of {_listed(samples)}", step))

    def _guarded(self, load: Callable[[Any], Any], argument: Any, what: str, step: int) -> Any:
        return guarded(load, argument, what, step, self._index)


def guarded(load: Callable[[Any], Any], argument: Any, what: str, step: int, index: int) -> Any:
    """Return `load(argument)`; its errors say of what, for which step and worker `index` it was."""
    try:
        return load(argument)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise DataError(
            f"{what} cannot be loaded for step {step} on worker {index}: "
            f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})."
        ) from error


def _listed(samples: list[int]) -> str:
    shown = ", ".join(map(str, samples[:8]))
    return f"samples {shown}" + (f" and {len(samples) - 8} more" if len(samples) > 8 else "")

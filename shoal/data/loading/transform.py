"""A function of the user's own, applied to every batch after it was loaded."""

import inspect
import traceback
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from shoal.core.errors import DataError
from shoal.data.loading.augment import sample_seeds
from shoal.data.loading.chunk import Chunk


class Transform:
    """Calls `function(batch)`, or `function(batch, seeds)` if it takes two arguments.

    `seeds` is an int64 tensor with 63 random bits for each sample, a pure function of (seed, epoch, sample): randomness
    that is made of them does not depend on who loads what.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._takes_seeds = _takes_two(function)

    def __call__(self, batch: Any, chunk: Chunk, number: int) -> Any:
        """Return what the function makes of batch `number` of `chunk`."""
        arguments = [batch]
        if self._takes_seeds:
            bounds = [0, *accumulate(chunk.sizes)]
            samples = chunk.samples[bounds[number] : bounds[number + 1]]
            seeds = sample_seeds(samples, seed=chunk.seed, epoch=chunk.epoch) >> np.uint64(1)
            arguments.append(torch.from_numpy(seeds.astype(np.int64)))
        try:
            return self._function(*arguments)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise DataError(
                f"transform(batch) failed at step {chunk.steps[number] + 1}: "
                f"{type(error).__name__}: {error} ({frame.filename}:{frame.lineno})."
            ) from error


def _takes_two(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(needed) >= 2

"""A batch to trace with: a few real samples, repeated; and a frame that leaves the process as it was."""

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from shoal.core.errors import DataError
from shoal.spec.call import plain
from shoal.spec.job import Job, is_stream

_DISTINCT_SAMPLES = 4
"""Enough to meet samples of unequal length; loading more would cost more than the trace."""


def sample_batch(job: Job, size: int) -> Any:
    """Return a batch of `size` samples, made of a few real ones from all over the data."""
    distinct = min(size, job.largest_batch, _DISTINCT_SAMPLES)
    indices = list(range(distinct))
    if not is_stream(job.data):
        indices = [position * len(job.data) // distinct for position in indices]
    try:
        samples = job.data.head(distinct) if is_stream(job.data) else _load(job.data, indices)
        return plain((job.collate or default_collate)([samples[i % len(samples)] for i in range(size)]))
    except Exception as error:
        raise DataError(
            f"samples {', '.join(map(str, indices))} of Job.data cannot be made into a batch: "
            f"{type(error).__name__}: {error}"
        ) from error


@contextlib.contextmanager
def process_untouched() -> Iterator[None]:
    """Give back the random states, the default dtype and the gradient mode as they were."""
    python_state, numpy_state, dtype = random.getstate(), np.random.get_state(), torch.get_default_dtype()
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_default_dtype(dtype)


def _load(data: Any, indices: list[int]) -> list[Any]:
    return list(data.__getitems__(indices)) if hasattr(data, "__getitems__") else [data[i] for i in indices]

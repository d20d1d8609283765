"""A batch as what it consists of: dicts, lists and tuples, and in them the leaves, which have the samples as rows."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from shoal.core.errors import DataError


def map_leaves(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return `batch` with `function` applied to its leaves: tensors, lists of plain values (strings, say), the rest."""
    if isinstance(batch, dict):
        return type(batch)((key, map_leaves(function, value)) for key, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a namedtuple takes its fields one by one
        return type(batch)(*(map_leaves(function, value) for value in batch))
    if isinstance(batch, (list, tuple)) and any(isinstance(x, (torch.Tensor, dict, list, tuple)) for x in batch):
        return type(batch)(map_leaves(function, value) for value in batch)
    return function(batch)


def without_rows(batch: Any) -> Any:
    """Return `batch` with no sample in its tensors, arrays and lists."""
    cut = map_leaves(_cut_to_none, batch)
    if cut is batch:
        raise DataError(
            f"a batch leaves this worker no sample, and a {type(batch).__name__} cannot be cut to none. Let collate "
            "take an empty list, or load with drop_last=True."
        )
    return cut


def _cut_to_none(leaf: Any) -> Any:
    has_rows = leaf.ndim > 0 if isinstance(leaf, (torch.Tensor, np.ndarray)) else isinstance(leaf, (list, tuple))
    return leaf[:0] if has_rows else leaf

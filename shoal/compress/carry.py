"""What is pending on some workers, handed over to another number of them.

The sum over workers of what is pending is what the model has not been given yet. It must stay the same:

1. Worker i of p becomes worker i mod p' of the p' that follow; those that meet on one are added.
2. A worker that is new starts with nothing pending.

Example: from 3 to 2 workers: 0 and 2 meet on the new 0, and 1 stays 1. From 2 to 3: both keep theirs, the third has
none.

`states` are those of workers that sum the same gradients: with tensor or pipeline axes, each group of them by itself.

What a codec remembers beside that (the factors Q of powersgd, which are alike everywhere, and running means) comes from
the worker of the same number, or from the first.
"""

from collections.abc import Sequence
from typing import Any

import torch


def carried(states: Sequence[dict[str, Any]], workers: int) -> list[dict[str, Any]]:
    """Return the states of `workers` workers that go on where the workers of `states`, in their order, have stopped."""
    return [_merged(states[index::workers]) if index < len(states) else _fresh(states[0]) for index in range(workers)]


def _merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
    pending: dict[str, torch.Tensor] = {}
    for state in states:
        for name, value in state["pending"].items():
            pending[name] = pending[name] + value if name in pending else value.clone()
    return states[0] | {"pending": pending}


def _fresh(state: dict[str, Any]) -> dict[str, Any]:
    return state | {"pending": {}}

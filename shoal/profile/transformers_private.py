"""The private parts of transformers that tracing stands on. When they move, tests/profile/test_config.py says so."""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch


@contextlib.contextmanager
def on_fake_tensors() -> Iterator[None]:
    """Have transformers do what it does on real tensors where it would look at their numbers, which fakes have not.

    1. Without an attention mask it looks at the positions for several sequences packed into one sample, and on fakes
       would write out a mask of length x length that a real run does not have. A sample is taken for one sequence.
    2. Products of tokens with their experts' weights are known to fakes in bfloat16 alone. A product of all tokens with
       one expert's weights has the same cost, and the same shape.
    3. BART's kin draw a number for each layer, to drop it (layerdrop). None is dropped.
    """
    with contextlib.ExitStack() as stack:
        for module, name, instead in (
            ("transformers.masking_utils", "find_packed_sequence_indices", lambda *_, **__: None),
            ("transformers.integrations.moe", "_grouped_mm", _one_expert),
        ):
            found = sys.modules.get(module)
            if hasattr(found, name):
                stack.enter_context(mock.patch.object(found, name, instead))
        stack.enter_context(mock.patch.object(torch, "rand", _rand))
        yield


def _one_expert(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:  # noqa: A002, ARG001
    return input.to(weight.dtype) @ weight[0]


_DRAW = torch.rand


def _rand(*size: Any, **options: Any) -> torch.Tensor:
    """Return what torch.rand does; of a single number, a 1 that fakes can compare, which drops nothing."""
    if size in (([],), ((),)) and not options:
        return torch.tensor(1.0)
    return _DRAW(*size, **options)

"""Doing without torch.compile for a while."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def eager() -> Iterator[None]:
    """Do without torch.compile: in the first step, which shows whether the model draws random numbers."""
    torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        torch.compiler.set_stance("default")

"""The private parts of torch that tracing stands on. When they move, tests/profile/test_torch_private.py says which."""

from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

__all__ = [
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeCopyMode",
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "tree_map_only",
    "without_autocast",
]


def without_autocast() -> Any:
    """Return a context in which operations on the CPU are not looked at by autocast: what its own kernels run in."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))

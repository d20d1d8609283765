"""The private parts of torch that tracing stands on. When they move, tests/profile/test_torch_private.py says which."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
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
    "cpu_kernels_replaced",
    "tree_map_only",
    "without_autocast",
]


@contextlib.contextmanager
def cpu_kernels_replaced(kernels: Mapping[str, Callable[..., Any]], *, key: str) -> Iterator[None]:
    """Run `kernels`, by the names of aten's operations, in place of torch's own for the dispatch key `key`."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for name, kernel in kernels.items():
            library.impl(name, kernel, key)
        yield
    finally:
        library._destroy()


def without_autocast() -> Any:
    """Return a context in which operations on the CPU are not looked at by autocast: what its own kernels run in."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))

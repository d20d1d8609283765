"""The private parts of torch that tracing stands on. When they move, tests/profile/test_torch_private.py says which."""

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
]

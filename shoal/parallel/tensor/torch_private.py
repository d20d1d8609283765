"""The private parts of torch that tensor parallelism uses. When they move, tests/parallel/tensor/test_parts.py says."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed import _functional_collectives as _collectives
from torch.nn.modules import module as _module
from torch.utils._pytree import tree_flatten, tree_map_only

from shoal.comm.collectives import Waiting, timed
from shoal.comm.traffic import TRAFFIC

__all__ = ["COLLECTIVES", "METADATA", "replaces_output", "timed_collectives", "tree_flatten", "tree_map_only"]

_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_cuda", "is_cpu", "is_meta", "is_leaf")
_METHODS = ("size", "dim", "numel", "nelement", "is_contiguous", "is_floating_point", "register_hook", "__hash__")

METADATA: frozenset[Callable[..., Any]] = frozenset(
    [getattr(Tensor, name).__get__ for name in _PROPERTIES] + [getattr(Tensor, name) for name in _METHODS]
)
"""What asks a tensor about itself and not for its numbers, in the form in which a function mode sees it."""


def replaces_output(module: nn.Module) -> bool:
    """Return whether hooks on the backward of `module` put another tensor in the place of its output."""
    own = module._backward_hooks or module._backward_pre_hooks
    return bool(own or _module._global_backward_hooks or _module._global_backward_pre_hooks)


_NAMES = ("all_reduce", "all_gather_single", "all_gather_tensor", "reduce_scatter_single", "reduce_scatter_tensor")
COLLECTIVES = tuple(name for name in (*_NAMES, "wait_tensor") if hasattr(_collectives, name))
"""The functions by which DTensor communicates, under the names that this torch has for them."""


@contextmanager
def timed_collectives(waiting: Waiting) -> Iterator[None]:
    """Let DTensor's communication run inside `waiting()`, for the length of a `with` block."""
    held = {name: getattr(_collectives, name) for name in COLLECTIVES}
    started: dict[int, tuple[Any, str, Tensor]] = {}
    for name, function in held.items():
        noted = _ended(function, started) if name == "wait_tensor" else _begun(name, function, started)
        setattr(_collectives, name, timed(noted, waiting))
    try:
        yield
    finally:
        for name, function in held.items():
            setattr(_collectives, name, function)


def _begun(name: str, function: Callable[..., Any], started: dict[int, tuple[Any, str, Tensor]]) -> Callable[..., Any]:
    """Return a collective that is noted in `started`, by the memory of what it returns."""
    op = name.replace("_single", "").replace("_tensor", "").replace("_", "-")

    def begun(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        begin = TRAFFIC.begin(tensor)
        result = function(tensor, *args, **kwargs)
        inner = getattr(result, "elem", result)
        started[inner.data_ptr()] = begin, op, inner if inner.nbytes > tensor.nbytes else tensor
        return result

    return begun


def _ended(function: Callable[..., Any], started: dict[int, tuple[Any, str, Tensor]]) -> Callable[..., Any]:
    """Return what waits for a collective, which counts as done then."""

    def ended(tensor: Tensor) -> Any:
        result = function(tensor)
        found = started.pop(getattr(tensor, "elem", tensor).data_ptr(), None)
        if found is not None:
            begin, op, largest = found
            TRAFFIC.end(begin, op, "engine", largest)
        return result

    return ended

"""What a call asks for in numbers: the new shape of a view, the pieces of a split; and where a divided dim ends up."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor

Functions: TypeAlias = frozenset[Callable[..., Any]]

_FLATTEN = Functions({Tensor.flatten, torch.flatten})
_UNFLATTEN = Functions({Tensor.unflatten, torch.unflatten})
VIEWS = Functions({Tensor.view, Tensor.reshape, torch.reshape}) | _FLATTEN | _UNFLATTEN
"""The functions that change a tensor's shape and keep the order of its numbers."""

_SPLIT = Functions({Tensor.split, torch.split}) | Functions({Tensor.split_with_sizes, torch.split_with_sizes})
_CHUNK = Functions({Tensor.chunk, torch.chunk})
_TENSOR_SPLIT = Functions({Tensor.tensor_split, torch.tensor_split})
SPLITS = _SPLIT | _CHUNK | _TENSOR_SPLIT | {Tensor.__getitem__}
"""The functions that take pieces out of a tensor along one dim."""

Shape = Sequence[int]
Pieces = list[tuple[int, int]]


def asked_shape(
    func: Callable[..., Any], shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[int, ...] | None:
    """Return the shape that `func`, one of VIEWS, is to give a tensor of `shape`; None if it asks something else."""
    if func in _FLATTEN:
        first, last = _arguments(args, kwargs, start_dim=0, end_dim=-1)
        first, last = first % len(shape), last % len(shape)
        return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])
    if func in _UNFLATTEN:
        dim, sizes = _arguments(args, kwargs, dim=0, sizes=())
        if not isinstance(dim, int):
            return None
        dim %= len(shape)
        return (*shape[:dim], *_resolved(sizes, shape[dim]), *shape[dim + 1 :])
    asked: Any = args or tuple(kwargs.values())
    if len(asked) == 1 and isinstance(asked[0], (tuple, list)):
        asked = asked[0]
    if not asked or not all(isinstance(size, int) for size in asked):
        return None  # view(dtype)
    return _resolved(asked, math.prod(shape))


def asked_pieces(
    func: Callable[..., Any], shape: Shape, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int
) -> Pieces | None:
    """Return where along `dim` the pieces that `func`, one of SPLITS, takes begin and end; None if elsewhere."""
    if func is Tensor.__getitem__:
        return _sliced(args[0], shape, dim)
    size = shape[dim]
    named = next((value for name, value in kwargs.items() if name != "dim"), 1)
    how, asked_dim = _arguments(args, kwargs, how=named, dim=0)
    if not isinstance(asked_dim, int) or asked_dim % len(shape) != dim:
        return None
    if func in _SPLIT and isinstance(how, (list, tuple)):
        return _between([0, *(sum(how[: count + 1]) for count in range(len(how)))])
    if func in _TENSOR_SPLIT and isinstance(how, (list, tuple)):
        return _between([0, *how, size])
    if not isinstance(how, int) or (func in _TENSOR_SPLIT and size % how):
        return None
    each = how if func in _SPLIT else -(-size // how)
    return _between([*range(0, size, each), size])


def moved_dim(old: Shape, new: Shape, dim: int, degree: int) -> int | None:
    """Return the dim of `new` that holds what `dim` of `old`, divided by `degree`, held; None if there is none."""
    outer = math.prod(old[:dim])
    for index, size in enumerate(new):
        if math.prod(new[:index]) == outer and size % degree == 0:
            return index
    return None


def moved_sections(
    old: Shape, new: Shape, dim: int, sections: Shape, degree: int
) -> tuple[int, tuple[int, ...]] | None:
    """Return the dim of `new` in which a tensor packed in `sections` along `dim` is divided, and its sections there.

    [2, 8, 48] in sections (16, 16, 16) seen as [2, 8, 3, 4, 4] is divided in dim 3, and packed no more; seen as
    [2, 8, 12, 4] it is packed in dim 2, in sections (4, 4, 4).
    """
    outer, inner = math.prod(old[:dim]), math.prod(old[dim + 1 :])
    is_even = len(set(sections)) == 1
    for index, size in enumerate(new):
        if math.prod(new[:index]) != outer:
            continue
        if is_even and size == len(sections) and new[index + 1 :] and new[index + 1] % degree == 0:
            return index + 1, ()
        unit = math.prod(new[index + 1 :])
        if all(section * inner % (unit * degree) == 0 for section in sections):
            return index, tuple(section * inner // unit for section in sections)
    return None


def _resolved(sizes: Shape, numbers: int) -> tuple[int, ...]:
    known = math.prod(size for size in sizes if size != -1)
    return tuple(numbers // max(known, 1) if size == -1 else int(size) for size in sizes)


def _arguments(args: tuple[Any, ...], kwargs: dict[str, Any], **defaults: Any) -> list[Any]:
    """Return the values of the parameters named in `defaults`, in their order."""
    given = dict(zip(defaults, args, strict=False))
    return [given.get(name, kwargs.get(name, default)) for name, default in defaults.items()]


def _between(ends: Shape) -> Pieces:
    return list(pairwise(ends))


def _sliced(index: Any, shape: Shape, dim: int) -> Pieces | None:
    """Return the piece of [..., start:stop] along `dim`; None if the index does more than that."""
    items = index if isinstance(index, tuple) else (index,)
    if any(item is not Ellipsis and not isinstance(item, slice) for item in items):
        return None
    if Ellipsis in items:
        position = items.index(Ellipsis)
        items = (*items[:position], *(slice(None),) * (len(shape) - len(items) + 1), *items[position + 1 :])
    items = (*items, *(slice(None),) * (len(shape) - len(items)))
    if any(item != slice(None) for number, item in enumerate(items) if number != dim):
        return None
    start, stop, step = items[dim].indices(shape[dim])
    return [(start, stop)] if step == 1 else None

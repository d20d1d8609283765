"""Plain code on divided tensors: what DTensor cannot do, or does by gathering, is done on the parts instead.

Inside a divided block every activation is a DTensor with its global shape, so the user's `view(batch, length, heads,
width)` stays right. This mode sees each function of torch before DTensor does:

1. A change of shape that keeps the divided range in one dim is made on the part. The range of a tensor divided in `dim`
   is an n-th of every run of `prod(shape[dim:])` numbers; any new dim that begins after the same outer numbers, and is
   divisible, holds the same range: [2, 8, 64] divided in dim 2 viewed as [2, 8, 4, 16] is divided in dim 2, its heads.
2. A packed tensor (parallel/tensor/placed.py) is taken apart by view, split, chunk or slices: each part on its own.
3. Attention and batched products over divided heads run on the heads that are here.
4. What DTensor has no rule for runs on whole tensors, on every worker alike. Everything else passes through untouched.
"""

import contextlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.overrides import TorchFunctionMode

from shoal.parallel.tensor.placed import (
    mark_packed,
    packed,
    placed,
    placed_as,
    sections_of,
    shard_dim,
    to_part,
    to_plain,
)
from shoal.parallel.tensor.placed import unpacked as unpack
from shoal.parallel.tensor.shapes import SPLITS, VIEWS, asked_pieces, asked_shape, moved_dim, moved_sections
from shoal.parallel.tensor.torch_private import METADATA, tree_flatten, tree_map_only

_ELEMENTWISE = frozenset(
    {Tensor.contiguous, Tensor.clone, Tensor.to, Tensor.float, Tensor.bfloat16, Tensor.half, Tensor.type_as}
    | {torch.clamp, torch.clip, torch.clone, Tensor.clamp, Tensor.clip}
)
_PRODUCTS = frozenset({torch.matmul, Tensor.matmul, Tensor.__matmul__})


class DividedMode(TorchFunctionMode):
    """Runs plain code on divided tensors; active while the forward of a divided block runs."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            return func(*args, **kwargs)
        if args and sections_of(args[0]):
            done, result = _take_apart(func, args, kwargs)
            if done:
                return result
        return _run(func, *tree_map_only(DTensor, unpack, (args, kwargs)))


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the result of `func` on tensors none of which is packed."""
    if func in VIEWS and shard_dim(args[0]) is not None:
        return _view(func, args, kwargs)
    if func is F.scaled_dot_product_attention:
        return _attend(args, kwargs)
    if func in _PRODUCTS and _share_batch_dim(*args[:2]):
        return _on_parts(func, args, shard_dim(args[0]))
    if func is torch.einsum and (letter := _shared_letter(*args)):
        return _einsum(letter, *args)
    return _call(func, args, kwargs)


def _take_apart(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[bool, Any]:
    """Return whether `func` can be done on the parts of the packed tensor args[0], and its result."""
    tensor: DTensor = args[0]
    mark = sections_of(tensor)
    assert mark is not None
    dim, sections = mark
    if func in _ELEMENTWISE and not any(isinstance(value, Tensor) for value in args[1:]):
        result = func(*args, **kwargs)
        mark_packed(result, dim, sections)
        return True, result
    if func in VIEWS:
        shape = asked_shape(func, tensor.shape, args[1:], kwargs)
        return _view_packed(tensor, shape, dim, sections) if shape else (False, None)
    pieces = asked_pieces(func, tensor.shape, args[1:], kwargs, dim) if func in SPLITS else None
    ends = [sum(sections[:count]) for count in range(len(sections) + 1)]
    if not pieces or any(start not in ends or stop not in ends or start >= stop for start, stop in pieces):
        return False, None  # a piece that begins or ends inside a section
    taken = [_piece(tensor, dim, start, sections[ends.index(start) : ends.index(stop)]) for start, stop in pieces]
    return True, taken[0] if func is Tensor.__getitem__ else tuple(taken)


def _piece(tensor: DTensor, dim: int, start: int, sections: Sequence[int]) -> DTensor:
    """Return those `sections` of a packed tensor that begin at `start` of the whole."""
    degree = tensor.device_mesh.size()
    part = to_part(tensor, Shard(dim)).narrow(dim, start // degree, sum(sections) // degree)
    return packed(part, tensor.device_mesh, dim, sections)


def _view_packed(tensor: DTensor, shape: tuple[int, ...], dim: int, sections: Sequence[int]) -> tuple[bool, Any]:
    degree = tensor.device_mesh.size()
    moved = moved_sections(tensor.shape, shape, dim, sections, degree)
    if moved is None:
        return False, None
    new_dim, new_sections = moved
    part = to_part(tensor, Shard(dim)).reshape(_local(shape, new_dim, degree))
    return True, packed(part, tensor.device_mesh, new_dim, new_sections)


def _view(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor: DTensor = args[0]
    dim, degree = shard_dim(tensor), tensor.device_mesh.size()
    shape = asked_shape(func, tensor.shape, args[1:], kwargs)
    if dim is None or shape is None or tensor.shape[dim] % degree:
        return _call(func, args, kwargs)
    new_dim = moved_dim(tensor.shape, shape, dim, degree)
    if new_dim is None:
        # DTensor may refuse such a view, or keep an order of parts that others cannot read.
        return func(placed_as(tensor, Replicate()), *args[1:], **kwargs)
    part = to_part(tensor, Shard(dim))
    local = _local(shape, new_dim, degree)
    return placed(part.view(local) if func is Tensor.view else part.reshape(local), tensor.device_mesh, Shard(new_dim))


def _local(shape: tuple[int, ...], dim: int, degree: int) -> tuple[int, ...]:
    return (*shape[:dim], shape[dim] // degree, *shape[dim + 1 :])


def _share_batch_dim(left: Any, right: Any) -> bool:
    """Return whether both factors are divided in the same dim of the batch, so that their parts can be multiplied."""
    left_dim, right_dim = shard_dim(left), shard_dim(right)
    if left_dim is None or right_dim is None:
        return False
    from_right = left.ndim - left_dim
    return bool(from_right > 2 and from_right == right.ndim - right_dim and left.ndim == right.ndim)


def _on_parts(func: Callable[..., Any], args: tuple[Any, ...], dim: int | None) -> Any:
    assert dim is not None
    mesh = args[0].device_mesh
    return placed(func(*[to_part(tensor, Shard(dim)) for tensor in args]), mesh, Shard(dim))


def _shared_letter(equation: Any, *operands: Any) -> str | None:
    """Return the index of an einsum in which its operands are divided, if it is one for all and stays in the result."""
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    dims = [shard_dim(operand) for operand in operands]
    letters = {indices[dim] for indices, dim in zip(inputs.split(","), dims, strict=False) if dim is not None}
    is_whole = len(operands) == inputs.count(",") + 1 and all(isinstance(operand, Tensor) for operand in operands)
    letter = letters.pop() if len(letters) == 1 else ""
    return letter if is_whole and letter and letter in output else None


def _einsum(letter: str, equation: str, *operands: Tensor) -> DTensor:
    """Return an einsum over what is here of the index `letter`; what does not have it is whole on every worker."""
    inputs, output = equation.replace(" ", "").split("->")
    mesh = next(operand.device_mesh for operand in operands if isinstance(operand, DTensor))
    parts = []
    for indices, operand in zip(inputs.split(","), operands, strict=True):
        own = operand if isinstance(operand, DTensor) else placed(operand, mesh, Replicate())
        if letter in indices:
            placement = Shard(indices.index(letter))
            parts.append(to_part(placed_as(own, placement), placement))
        else:  # each worker has a summand of its gradient
            parts.append(to_part(placed_as(own, Replicate()), Partial()))
    return placed(torch.einsum(equation, *parts), mesh, Shard(output.index(letter)))


_ATTENTION = inspect.Signature(
    [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("query", "key", "value")]
    + [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
        for name, default in (("attn_mask", None), ("dropout_p", 0.0), ("is_causal", False))
    ]
    + [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        for name, default in (("scale", None), ("enable_gqa", False))
    ]
)


def _attend(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the attention of the heads that are here; of all of them, where they do not divide."""
    call = _ATTENTION.bind(*args, **kwargs).arguments
    heads = [call.pop(name) for name in ("query", "key", "value")]
    mesh = next((tensor.device_mesh for tensor in heads if isinstance(tensor, DTensor)), None)
    if mesh is None:
        return F.scaled_dot_product_attention(*args, **kwargs)
    heads = [tensor if isinstance(tensor, DTensor) else placed(tensor, mesh, Replicate()) for tensor in heads]
    dim = _attention_dim(heads, mesh.size())
    placement = Replicate() if dim is None else Shard(dim)
    if call.get("dropout_p"):  # ExactDropout, a mode below this one, must see which heads are here, to drop its own
        heads = [placed_as(tensor, placement) for tensor in heads]
        with contextlib.suppress(NotImplementedError):
            return F.scaled_dot_product_attention(*heads, **call)
    query, key, value = (to_part(placed_as(tensor, placement), placement) for tensor in heads)
    mask = call.pop("attn_mask", None)
    if mask is not None:
        mask = _mask_part(mask, heads[0], dim)
    return placed(F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **call), mesh, placement)


def _attention_dim(heads: list[DTensor], degree: int) -> int | None:
    """Return the dim of the batch or of the heads in which all three are, or can be, divided."""
    dims = {shard_dim(tensor) for tensor in heads}
    if len(dims) == 1:
        (dim,) = dims
        if dim is None or (dim < heads[0].ndim - 2 and not any(tensor.shape[dim] % degree for tensor in heads)):
            return dim
    can = all(tensor.ndim == 4 and tensor.shape[1] % degree == 0 for tensor in heads)
    return 1 if can else None


def _mask_part(mask: Tensor, query: DTensor, dim: int | None) -> Tensor:
    """Return what the heads that are here need of `mask`, which broadcasts against the scores from the right."""
    mesh = query.device_mesh
    whole = mask if isinstance(mask, DTensor) else placed(mask, mesh, Replicate())
    if dim is None:
        return to_plain(whole)
    own = dim - (query.ndim - mask.ndim)
    if own < 0 or mask.shape[own] == 1:  # the same for all heads: each worker has a summand of its gradient
        return to_part(placed_as(whole, Replicate()), Partial())
    return to_part(placed_as(whole, Shard(own)), Shard(own))


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what DTensor makes of it; where it has no rule, the same on whole tensors."""
    try:
        return func(*args, **kwargs)
    except NotImplementedError:
        leaves = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, DTensor)]
        name = getattr(func, "__name__", "")
        writes = "out" in kwargs or (name.endswith("_") and not name.endswith("__"))
        if not leaves or writes:
            raise
        mesh = leaves[0].device_mesh
        args, kwargs = tree_map_only(DTensor, to_plain, (args, kwargs))
        return tree_map_only(Tensor, lambda tensor: placed(tensor, mesh, Replicate()), func(*args, **kwargs))

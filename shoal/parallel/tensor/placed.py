"""Tensors that lie in parts on the workers of one mesh axis: DTensors with one placement.

A *packed* tensor is the output of a projection that computes several things at once, such as queries, keys and values
side by side. Each of its sections is divided on its own, so a worker's part holds its heads of all three:

    whole  [q0 q1 | k0 k1 | v0 v1]        worker 0  [q0 k0 v0]        worker 1  [q1 k1 v1]

No placement of DTensor says so; the tensor is marked, and whatever cannot use the mark calls `unpacked` first.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

_MARK = "_shoal_packed"


def placed(part: Tensor, mesh: DeviceMesh, placement: Placement) -> DTensor:
    """Return the tensor of which `part` is this worker's part, or one summand if `placement` is Partial."""
    return DTensor.from_local(part, mesh, [placement], run_check=False)


def to_part(tensor: DTensor, gradient: Placement) -> Tensor:
    """Return this worker's part of `tensor`; the gradients of the parts are laid out by `gradient`."""
    return tensor.to_local(grad_placements=[gradient])


def placed_as(tensor: DTensor, placement: Placement) -> DTensor:
    """Return `tensor` laid out by `placement`; where it is not yet, this is a collective of the workers of its mesh."""
    return tensor if tensor.placements == (placement,) else tensor.redistribute(placements=[placement])


def to_plain(tensor: DTensor) -> Tensor:
    """Return the whole of `tensor` as a plain tensor, the same on every worker."""
    return to_part(placed_as(unpacked(tensor), Replicate()), Replicate())


def shard_dim(tensor: Any) -> int | None:
    """Return the dim that `tensor` is divided in; None if it is whole, a sum still to be made, or no DTensor."""
    if not isinstance(tensor, DTensor):
        return None
    placement = tensor.placements[0]
    # The class itself, because a subclass deals its parts out in another order.
    return placement.dim % tensor.ndim if type(placement) is Shard else None


def packed(part: Tensor, mesh: DeviceMesh, dim: int, sections: Sequence[int]) -> DTensor:
    """Return the tensor of which `part` holds this worker's part of each of `sections` (whole sizes) along `dim`."""
    tensor = placed(part, mesh, Shard(dim))
    if len(sections) > 1:
        mark_packed(tensor, dim, sections)
    return tensor


def mark_packed(tensor: DTensor, dim: int, sections: Sequence[int]) -> None:
    """Note on `tensor` that its parts along `dim` are those of `sections`."""
    setattr(tensor, _MARK, (dim, tuple(sections)))


def sections_of(tensor: Any) -> tuple[int, tuple[int, ...]] | None:
    """Return the dim and the sections of a packed tensor; None for all others."""
    found: tuple[int, tuple[int, ...]] | None = getattr(tensor, _MARK, None) if isinstance(tensor, DTensor) else None
    return found


def unpacked(tensor: DTensor) -> DTensor:
    """Return a packed tensor whole and in its true order; others as they are. A collective if it is packed."""
    mark = sections_of(tensor)
    if mark is None:
        return tensor
    dim, sections = mark
    degree = tensor.device_mesh.size()
    gathered = to_plain(placed(to_part(tensor, Shard(dim)), tensor.device_mesh, Shard(dim)))
    return placed(joined(gathered.chunk(degree, dim), dim, sections), tensor.device_mesh, Replicate())


def cut(whole: Tensor, dim: int, sections: Sequence[int], index: int, count: int) -> Tensor:
    """Return part `index` of `count` of each of `sections` of `whole` along `dim`, one after the other."""
    if not sections:
        return whole.chunk(count, dim)[index]
    return torch.cat([section.chunk(count, dim)[index] for section in whole.split_with_sizes(list(sections), dim)], dim)


def joined(parts: Sequence[Tensor], dim: int, sections: Sequence[int]) -> Tensor:
    """Return the whole of which `parts` are the cuts, in order."""
    if not sections:
        return torch.cat(list(parts), dim)
    pieces = [part.split_with_sizes([size // len(parts) for size in sections], dim) for part in parts]
    return torch.cat([piece for section in zip(*pieces, strict=True) for piece in section], dim)

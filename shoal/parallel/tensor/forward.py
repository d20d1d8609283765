"""How the modules of a divided block run: each function here takes the place of one module's forward.

Between a column and its row every worker has its own heads or features; before and after, every worker has all of
them (or, with sequence parallelism, all of them for its own tokens):

    x, whole --column--> features / n --row--> one summand each --sum--> whole      (sum: all-reduce)
    tokens / n --gather--> whole --column--> features / n --row--> --sum--> tokens / n     (sum: reduce-scatter)

The products run on plain local tensors: DTensor only carries the parts, so it never chooses to gather a weight.
"""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import implicit_replication

from shoal.core.errors import PlanError
from shoal.parallel.tensor.divided import DividedMode
from shoal.parallel.tensor.placed import packed, placed, placed_as, shard_dim, to_part, to_plain, unpacked
from shoal.parallel.tensor.torch_private import replaces_output, tree_flatten, tree_map_only

Forward = Callable[..., Any]
TOKENS = Shard(1)
"""How the residual stream [batch, tokens, width] lies with sequence parallelism."""

_depth = 0


@contextmanager
def tensor_context() -> Any:
    """Let plain tensors meet divided ones, as whole. To be entered around forward and backward; may be nested."""
    global _depth  # noqa: PLW0603 -- torch's switch is one for the process, and its context cannot be nested
    _depth += 1
    try:
        if _depth > 1:
            yield
            return
        with implicit_replication():
            yield
    finally:
        _depth -= 1


def run_region(forward: Forward, mesh: DeviceMesh, sequence: bool, is_last: bool, *args: Any, **kwargs: Any) -> Any:
    """Run a divided block: tensors enter and leave it plain and whole; between blocks of a run tokens stay divided."""
    args, kwargs = tree_map_only(Tensor, lambda tensor: as_placed(tensor, mesh), (args, kwargs))
    stream = _stream(args, kwargs) if sequence else None
    if stream is not None:
        divided = _divide_tokens(stream, mesh)
        args, kwargs = tree_map_only(DTensor, lambda t: divided if t is stream else t, (args, kwargs))
    with tensor_context(), DividedMode():
        out = forward(*args, **kwargs)
    stays = None if stream is None or is_last else stream.shape
    return tree_map_only(DTensor, lambda tensor: _left(tensor, stays), out)


def _stream(args: Any, kwargs: Any) -> DTensor | None:
    leaves = tree_flatten((args, kwargs))[0]
    streams = [t for t in leaves if isinstance(t, DTensor) and t.is_floating_point() and t.ndim == 3]
    return streams[0] if streams else None


def _divide_tokens(stream: DTensor, mesh: DeviceMesh) -> DTensor:
    length, degree = stream.shape[1], mesh.size()
    if length % degree:
        raise PlanError(
            f"sequence parallelism over tensor={degree} divides the tokens, and a sample has {length} of them. "
            f"Use sequence=false, or samples whose length is a multiple of {degree}."
        )
    return placed_as(stream, TOKENS)


def _left(tensor: DTensor, stays: torch.Size | None) -> Tensor:
    if stays is not None and tensor.shape == stays and tensor.is_floating_point():
        return placed_as(unpacked(tensor), TOKENS)
    plain = to_plain(tensor)
    # A copy, not a view: an engine around the block hooks itself to what leaves it, and would lose that where the model
    # goes on in place (x += ...).
    return plain.clone() if plain._is_view() else plain


def run_start(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    """Run the module in which a column begins: its inputs are made whole once, and their gradients summed once."""
    args, kwargs = tree_map_only(DTensor, _whole_at_start, (args, kwargs))
    return forward(*args, **kwargs)


def _whole_at_start(tensor: DTensor) -> DTensor:
    if tensor.requires_grad or shard_dim(tensor) is not None:
        # Also of one that is whole already: in backward this is where the summands of the gradient meet.
        return unpacked(tensor).redistribute(placements=[Replicate()])
    return tensor


def run_opaque(forward: Forward, mesh: DeviceMesh, *args: Any, **kwargs: Any) -> Any:
    """Run a module that stays whole on every worker: on plain tensors, all workers alike."""
    args, kwargs = tree_map_only(DTensor, to_plain, (args, kwargs))
    return tree_map_only(Tensor, lambda tensor: placed(tensor, mesh, Replicate()), forward(*args, **kwargs))


def run_column(module: nn.Module, mesh: DeviceMesh, sections: tuple[int, ...], x: Tensor) -> Tensor:
    """Return this worker's columns of a linear's output, of each section if it is packed."""
    whole = placed_as(as_placed(x, mesh), Replicate())
    bias = None if module.bias is None else to_part(cast(DTensor, module.bias), Shard(0))
    part = _product(module, to_part(whole, Partial()), bias)
    out = packed(part, mesh, part.ndim - 1, sections)
    return unpacked(out) if sections and replaces_output(module) else out  # another tensor would not have the mark


def run_row(module: nn.Module, mesh: DeviceMesh, sequence: bool, x: Tensor) -> Tensor:
    """Return a linear's output, summed over the workers, of which each has the features that its columns made."""
    features = Shard(x.ndim - 1)
    part = _product(module, to_part(placed_as(as_placed(x, mesh), features), features), None)
    joined: Placement = TOKENS if sequence and part.ndim == 3 and part.shape[1] % mesh.size() == 0 else Replicate()
    out = placed(part, mesh, Partial()).redistribute(placements=[joined])
    if module.bias is None:
        return out
    return out + cast(Tensor, module.bias).to(out.dtype)  # once, so after the sum


def _product(module: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
    weight = cast(DTensor, module.weight)
    own = to_part(weight, weight.placements[0])
    return F.linear(x, own if isinstance(module, nn.Linear) else own.t(), bias)


def run_vocab(module: nn.Embedding, mesh: DeviceMesh, tokens: Tensor) -> Tensor:
    """Return the embeddings of `tokens`: each worker looks up those whose rows it has, and the sum is all of them."""
    ids = to_plain(tokens) if isinstance(tokens, DTensor) else tokens
    weight = to_part(cast(DTensor, module.weight), Shard(0))
    start = mesh.get_local_rank() * len(weight)
    is_here = (ids >= start) & (ids < start + len(weight))
    padding = None if module.padding_idx is None else module.padding_idx - start
    if padding is not None and not 0 <= padding < len(weight):
        padding = None
    rows = F.embedding(torch.where(is_here, ids - start, 0), weight, padding)
    out = placed(rows.masked_fill(~is_here.unsqueeze(-1), 0.0), mesh, Partial()).redistribute(placements=[Replicate()])
    return out if isinstance(tokens, DTensor) else to_plain(out)


def run_head(module: nn.Module, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """Return a linear's whole output, of which each worker computes its columns."""
    start = as_placed(x, mesh).redistribute(placements=[Replicate()])
    out = placed_as(cast(DTensor, run_column(module, mesh, (), start)), Replicate())
    return out if isinstance(x, DTensor) else to_plain(out)


def as_placed(tensor: Tensor, mesh: DeviceMesh) -> DTensor:
    """Return `tensor` as one that every worker of `mesh` has whole, if it is plain; in its true order."""
    return unpacked(tensor) if isinstance(tensor, DTensor) else placed(tensor, mesh, Replicate())

"""Tensor parallelism on a plain model: its products are divided over the workers of one mesh axis, its code is not.

1. A plan (parallel/tensor/plan.py) gives modules a style: column, row, vocab, head or opaque.
2. A divided region is a block that has columns or rows. All its parameters become DTensors: those of columns and
   rows in parts, the others whole on every worker. What enters it becomes a DTensor of global shape, what leaves it
   plain.
3. Inside, each line of the user's code sees global shapes (divided.py); columns and rows compute on their parts
   (forward.py).
4. Outside, all workers of the axis do the same; the token embedding and the output head are divided on their own.

Example: a block with query_key_value [3 * 64, 64] and out [64, 64] over 2 workers: each has [3 * 32, 64] and [64, 32],
2 of 4 heads, and one all-reduce of the block's output in forward, one of its input's gradient in backward.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from shoal.core.errors import PlanError
from shoal.parallel.tensor import forward
from shoal.parallel.tensor.blocks import find_blocks, is_inside
from shoal.parallel.tensor.forward import tensor_context
from shoal.parallel.tensor.placed import cut, joined, placed
from shoal.parallel.tensor.plan import Style
from shoal.profile.pairs import find_pairs

__all__ = ["Cut", "Division", "apply_tensor", "finish_gradients", "tensor_context"]


@dataclass(frozen=True)
class Cut:
    """A parameter lies in parts along `dim`; each of `sections`, if there are any, on its own."""

    dim: int
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class Division:
    """Which parameters lie in parts over a tensor axis of `count` workers, of which this is number `index`."""

    index: int
    count: int
    cuts: Mapping[str, Cut]

    def shard_of(self, name: str, full: Tensor) -> Tensor:
        """Return this worker's part of the parameter `name`, given the whole of it."""
        how = self.cuts.get(name)
        return full if how is None else cut(full, how.dim, how.sections, self.index, self.count).contiguous()

    def whole_of(self, name: str, parts: list[Tensor]) -> Tensor:
        """Return the whole of the parameter `name`, given the parts of all workers of the axis, in order."""
        how = self.cuts.get(name)
        return parts[0] if how is None else joined(parts, how.dim, how.sections)


def apply_tensor(model: nn.Module, mesh: DeviceMesh, plan: Mapping[str, Style], *, sequence: bool = False) -> Division:
    """Divide `model` by `plan` over the 1-D `mesh`, in place; return which parameters lie in parts, and how.

    Called by every worker of the mesh. Names of modules and parameters stay. The model may be on the meta device. With
    `sequence` the tokens between the pairs of a block are divided, too. Run it inside `tensor_context`.
    """
    regions = find_regions(model, plan)
    cuts = {id(p): how for name, style in plan.items() for p, how in _cuts(model.get_submodule(name), style)}
    division = Division(mesh.get_local_rank(), mesh.size(), _by_name(model, cuts))
    _replace_parameters(model, mesh, cuts, _whole_parameters(model, plan, regions))
    for name, style in plan.items():
        _replace_forward(model.get_submodule(name), mesh, style, sequence=sequence)
    for name, is_last in regions.items():
        region = model.get_submodule(name)
        _divide_starts(region, name, plan)
        _wrap(region, forward.run_region, mesh, sequence, is_last)
    return division


def finish_gradients(model: nn.Module) -> None:
    """Lay out every gradient as its parameter is: sum what each worker has a summand of. Called after backward.

    Called by every worker of the tensor axis. Under FSDP2 there is nothing left to do.
    """
    for parameter in model.parameters():
        gradient = parameter.grad
        if not isinstance(gradient, DTensor):
            continue
        if not isinstance(parameter, DTensor):
            parameter.grad = gradient.full_tensor()
        elif gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def find_regions(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, bool]:
    """Return the names of the divided regions, and whether each is the last of its run: where the stream ends.

    A region is the block that a column or row lies in; outside of blocks, what holds it.
    """
    blocks = find_blocks(model)
    found: set[str] = set()
    for name, style in plan.items():
        if style.kind in ("column", "row"):
            found.add(next((block for block in blocks if is_inside(name, block)), name.rpartition(".")[0]))
    outer = [name for name in found if not any(name != other and is_inside(name, other) for other in found)]
    ordered = [name for name, _ in model.named_modules() if name in outer]
    return {name: _next_to(model, name) not in outer for name in ordered}


def _next_to(model: nn.Module, name: str) -> str | None:
    """Return the name of what stands after the module `name` in the list that holds it."""
    holder, _, own = name.rpartition(".")
    module = model.get_submodule(holder)
    if not own or not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return None
    following = dict(pairwise(child for child, _ in module.named_children())).get(own)
    return following and (f"{holder}.{following}" if holder else following)


def _cuts(module: nn.Module, style: Style) -> Iterator[tuple[nn.Parameter, Cut]]:
    """Yield the parameters of `module` that lie in parts."""
    out_dim = 0 if isinstance(module, (nn.Linear, nn.Embedding)) else 1  # Conv1D keeps its weight transposed
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if style.kind == "opaque" or weight is None:
        return
    if style.kind == "row":
        yield weight, Cut(1 - out_dim)
        return
    yield weight, Cut(out_dim, style.sections)
    if bias is not None:
        yield bias, Cut(0, style.sections)


def _whole_parameters(model: nn.Module, plan: Mapping[str, Style], regions: Mapping[str, bool]) -> set[int]:
    """Return the ids of the parameters in divided regions, less those of opaque modules."""
    kept = {id(p) for name, s in plan.items() if s.kind == "opaque" for p in model.get_submodule(name).parameters()}
    return {id(p) for name in regions for p in model.get_submodule(name).parameters()} - kept


def _replace_parameters(model: nn.Module, mesh: DeviceMesh, cuts: Mapping[int, Cut], whole: set[int]) -> None:
    """Put DTensors in the place of the parameters that lie in parts or are `whole`; tied ones stay tied."""
    old = list(model.parameters())  # kept to the end, so that no new one gets the id of an old one
    new = {
        id(parameter): _placed_parameter(parameter, mesh, cuts.get(id(parameter)))
        for parameter in old
        if id(parameter) in cuts or id(parameter) in whole
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and id(parameter) in new:
                module._parameters[name] = new[id(parameter)]


def _placed_parameter(parameter: nn.Parameter, mesh: DeviceMesh, how: Cut | None) -> nn.Parameter:
    part: Tensor = parameter.detach()
    placement: Placement = Replicate()
    if how is not None:
        size, degree = part.shape[how.dim], mesh.size()
        if any(section % degree for section in how.sections or (size,)) or sum(how.sections or (size,)) != size:
            sizes = ", ".join(map(str, how.sections or (size,)))
            raise PlanError(f"tensor={degree} does not divide a parameter of shape {tuple(part.shape)} into {sizes}.")
        # A copy, so that the whole can be freed.
        part = cut(part, how.dim, how.sections, mesh.get_local_rank(), degree).clone(
            memory_format=torch.contiguous_format
        )
        placement = Shard(how.dim)
    return nn.Parameter(placed(part, mesh, placement), requires_grad=parameter.requires_grad)


def _by_name(model: nn.Module, cuts: Mapping[int, Cut]) -> dict[str, Cut]:
    return {
        name: cuts[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in cuts
    }


def _replace_forward(module: nn.Module, mesh: DeviceMesh, style: Style, *, sequence: bool) -> None:
    if style.kind == "opaque":
        _wrap(module, forward.run_opaque, mesh)
    elif style.kind == "row":
        _set_forward(module, functools.partial(forward.run_row, module, mesh, sequence))
    elif style.kind == "column":
        _set_forward(module, functools.partial(forward.run_column, module, mesh, style.sections))
    else:
        run: Any = forward.run_vocab if style.kind == "vocab" else forward.run_head
        _set_forward(module, functools.partial(run, module, mesh))


def _divide_starts(region: nn.Module, path: str, plan: Mapping[str, Style]) -> None:
    """Make inputs whole where a pair begins, once for all its columns."""
    styles = {
        id(region.get_submodule(n.removeprefix(f"{path}.") if path else n)): s.kind
        for n, s in plan.items()
        if is_inside(n, path)
    }
    for pair in find_pairs(region):
        kinds = {styles.get(id(module)) for module in pair.start.modules()}
        if "column" in kinds and styles.get(id(pair.start)) != "opaque":
            _wrap(pair.start, forward.run_start)


def _wrap(module: nn.Module, run: Any, *settings: Any) -> None:
    forward = module.forward
    _set_forward(module, functools.update_wrapper(functools.partial(run, forward, *settings), forward))


def _set_forward(module: nn.Module, forward: Any) -> None:
    module.__dict__["forward"] = forward  # on this instance; names, class and hooks stay as they are

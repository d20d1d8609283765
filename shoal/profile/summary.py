"""From what was recorded of each layer to the layers of a profile."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from shoal.profile.live import storage_bytes, strided_tensors
from shoal.profile.pairs import split_parameters
from shoal.profile.recorder import PassRecord, Visit
from shoal.spec.profile import Layer, Pass

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def is_regular(visits: list[Visit], weights: dict[int, int]) -> bool:
    """Return whether each layer that stands for several came out as its neighbour did, which could stand for them."""
    stands = [index for index, visit in enumerate(visits) if any(id(module) in weights for module in visit.modules)]
    return len(stands) == len(weights) and all(_are_alike(visits[i], visits[i + 1]) for i in stands)


def owned_tensors(model: nn.Module, visits: list[Visit], dropped: list[nn.Module]) -> list[list[torch.Tensor]]:
    """Return the parameters and buffers of each visit: each one once, where it is first used, tied or not.

    What no layer has (a position embedding of the model itself, a layer that is never called) goes to the first.
    """
    taken = {id(tensor) for module in dropped for tensor in _tensors(module)}
    owned = []
    for visit in visits:
        mine = [tensor for module in visit.modules for tensor in _tensors(module) if id(tensor) not in taken]
        taken.update(map(id, mine))
        owned.append(list({id(tensor): tensor for tensor in mine}.values()))
    owned[0] += [tensor for tensor in _tensors(model) if id(tensor) not in taken]
    return owned


def as_layer(
    visit: Visit,
    twice: Visit,
    tensors: list[torch.Tensor],
    *,
    optimizer: Any,
    weights: dict[int, int],
    blocks: set[int],
    vocabulary: Mapping[int, int],
    rounded: Callable[[int], int],
) -> Layer:
    """Return the layer of `visit`, which owns `tensors`; `twice` is the same with a micro-batch of twice the size.

    `weights` says how many layers a module (by id) stands for, `blocks` which modules are members of a run,
    `vocabulary` which weights (by id) have a row for each of how many tokens, `rounded` what the allocator takes.
    """
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    states = [optimizer.state[p] for p in parameters if p in optimizer.state]
    module = visit.modules[0] if visit.modules else None
    return Layer(
        name=visit.name,
        kind=type(module).__name__ if module is not None else "",
        repeats=max([weights.get(id(module), 1) for module in visit.modules], default=1),
        block=id(module) in blocks,
        parameters=sum(parameter.numel() for parameter in parameters),
        parameter_bytes=storage_bytes(tensors),
        padding=_padding(parameters, rounded),
        gradient_bytes=storage_bytes(p.grad for p in parameters if p.grad is not None),
        optimizer_bytes=storage_bytes(strided_tensors([list(state.values()) for state in states])),
        forward=_with_fixed(visit.forward.as_pass(), twice.forward.peak_bytes),
        backward=_with_fixed(visit.backward.as_pass(), twice.backward.peak_bytes),
        saved_bytes=visit.saved_bytes,
        saved_fixed_bytes=_fixed(visit.saved_bytes, twice.saved_bytes),
        saved_products_bytes=visit.saved_products_bytes,
        cast_bytes=_cast(visit),
        cast_fixed_bytes=_fixed(_cast(visit), _cast(twice)),
        output_bytes=visit.output_bytes,
        pairs=len(visit.pairs),
        split_parameters=(split_parameters(visit.pairs, module) if module is not None else 0)
        + sum(parameter.numel() for parameter in parameters if id(parameter) in vocabulary),
        split_saved_bytes=visit.split_saved_bytes,
        vocabulary=max([vocabulary.get(id(p), 0) for each in visit.modules for p in each.parameters()], default=0),
        heads=visit.heads,
        key_value_heads=_key_value_heads(module),
        batch_norms=_batch_norms(visit.modules),
    )


def merged(layers: Iterable[Layer]) -> tuple[Layer, ...]:
    """Return `layers` with neighbours that cost the same made one."""
    out: list[Layer] = []
    for layer in layers:
        if out and dataclasses.replace(layer, name=out[-1].name, repeats=out[-1].repeats) == out[-1]:
            out[-1] = dataclasses.replace(out[-1], repeats=out[-1].repeats + layer.repeats)
        else:
            out.append(layer)
    return tuple(out)


def _key_value_heads(module: nn.Module | None) -> int:
    """Return how many heads of keys and values the module's attention says that it has; 0 where it says nothing.

    Where keys are repeated for all heads before attention runs, the operation shows only those.
    """
    for descendant in module.modules() if module is not None else ():
        for holder in (descendant, getattr(descendant, "config", None)):
            heads = getattr(holder, "num_key_value_heads", None)
            if isinstance(heads, int):
                return heads
    return 0


def _batch_norms(modules: list[nn.Module]) -> tuple[str, ...]:
    """Return the names, within their layer, of the batch norms that take statistics of what they are given."""
    named = [found for module in modules for found in module.named_modules()]
    return tuple(name for name, module in named if isinstance(module, _BATCH_NORMS) and module.training)


def _are_alike(one: Visit, other: Visit) -> bool:
    """Return whether two visits did the same, and held the same but for 1% (a mask that somebody still keeps)."""
    same = (_work(one.forward), _work(one.backward)) == (_work(other.forward), _work(other.backward))
    return same and all(abs(a - b) <= max(abs(a), abs(b)) / 100 for a, b in zip(_held(one), _held(other), strict=True))


def _work(record: PassRecord) -> tuple[Any, ...]:
    return record.cost.flops, record.cost.operations, record.cost.products()


def _held(visit: Visit) -> tuple[int, ...]:
    return visit.saved_bytes, visit.grown_bytes, visit.output_bytes, visit.forward.peak_bytes, visit.backward.peak_bytes


def _with_fixed(record: Pass, twice_bytes: int) -> Pass:
    return dataclasses.replace(record, peak_fixed_bytes=_fixed(record.peak_bytes, twice_bytes))


def _cast(visit: Visit) -> int:
    return visit.grown_bytes - visit.saved_bytes


def _fixed(once_bytes: int, twice_bytes: int) -> int:
    return 2 * once_bytes - twice_bytes


def _padding(tensors: list[nn.Parameter], rounded: Callable[[int], int]) -> float:
    sizes = [tensor.untyped_storage().nbytes() for tensor in tensors]
    return sum(map(rounded, sizes)) / max(1, sum(sizes)) - 1 if sizes else 0.0


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]

"""The optimizer's state as slices, and back, whatever the optimizer was given: whole parameters, slices or DTensors."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shoal.core.errors import ConfigError, JobError
from shoal.fault.checkpoint.values import from_json, to_json
from shoal.fault.shards import Found, Shard, whole_shard
from shoal.parallel.layout import local_of
from shoal.training.saved_slices import Placement
from shoal.training.state import TrainState

_OF_THE_MACHINE = ("params", "foreach", "fused", "capturable", "differentiable")
"""What a group has that says how it is computed, not what: the run that goes on may do it otherwise."""
_NUMBER = "number"
"""Marks what was a number of Python, not a tensor."""


def optimizer_shards(state: TrainState, places: Mapping[str, Placement]) -> Iterator[Shard]:
    """Yield the slices of the optimizer's state that this worker holds: "optimizer/KEY/NAME"."""
    for name, parameter in _parameters(state):
        place = places[name]
        for key, value in state.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                yield from _shards_of(f"optimizer/{key}/{name}", value, place)
            elif isinstance(value, (bool, int, float)):
                yield place.single(f"optimizer/{key}:{_NUMBER}/{name}", torch.tensor(value, dtype=torch.float64))
            elif value is not None:
                raise JobError(
                    f"the optimizer keeps a {type(value).__name__} ({key!r}) for {name}, which no checkpoint can hold. "
                    "Use an optimizer that keeps tensors and numbers."
                )


def _shards_of(full_name: str, value: Tensor, place: Placement) -> Iterator[Shard]:
    local = local_of(value.detach())
    if tuple(value.shape) == place.shape or tuple(local.shape) == place.local_shape:
        yield from place.shards(full_name, local)
    elif isinstance(value, DTensor):
        whole = value.full_tensor()  # rows' or columns' means, small; all workers come by here in the same order
        yield place.single(full_name, whole)
    else:
        yield place.single(full_name, local)


def _parameters(state: TrainState) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the optimizer's own parameters, in its order, by their names in the model."""
    names = {id(parameter): name for name, parameter in state.layout.parameters.items()}
    names |= {id(local): names[id(sharded)] for local, sharded in state.slices.pairs if id(sharded) in names}
    for group in state.optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) not in names:
                raise JobError("the optimizer has a parameter that is none of the model's: no checkpoint can name it.")
            yield names[id(parameter)], parameter


def make_room(
    state: TrainState, places: Mapping[str, Placement], found: Mapping[str, Found]
) -> tuple[list[Shard], Callable[[], None]]:
    """Give the optimizer the state that `found` has, without its numbers yet.

    Return the slices to fill, and what to call when they are.
    """
    keys: dict[str, list[tuple[str, str]]] = {}
    for full in found:
        kind, _, rest = full.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            keys.setdefault(name, []).append((key, full))
    wanted: list[Shard] = []
    numbers: list[tuple[dict[str, Any], str, Tensor]] = []
    state.optimizer.state.clear()
    for name, parameter in _parameters(state):
        held: dict[str, Any] = {}
        for key, full in keys.get(name, []):
            saved, place = found[full], places[name]
            if key.endswith(f":{_NUMBER}"):
                room = torch.empty((), dtype=torch.float64)
                wanted.append(whole_shard(full, room))
                numbers.append((held, key.removesuffix(f":{_NUMBER}"), room))
            elif saved.shape == place.shape and key != "step":
                held[key] = torch.zeros_like(parameter, dtype=saved.dtype).detach()
                wanted += place.shards(full, local_of(held[key]))
            else:
                held[key] = _small(key, saved, parameter, state.optimizer)
                wanted.append(whole_shard(full, local_of(held[key])))
        if held or keys.get(name):
            state.optimizer.state[parameter] = held

    def finish() -> None:
        for held, key, room in numbers:
            value = room.item()
            held[key] = int(value) if value == int(value) else value

    return wanted, finish


def _small(key: str, saved: Found, parameter: nn.Parameter, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return room for what is not of the parameter's shape: alike on all that hold it."""
    is_here = key == "step" and not _is_on_device(optimizer)
    room = torch.empty(saved.shape, dtype=saved.dtype, device="cpu" if is_here else parameter.device)
    if isinstance(parameter, DTensor) and key != "step":
        return DTensor.from_local(room, parameter.device_mesh, [Replicate()] * parameter.device_mesh.ndim)
    return room


def _is_on_device(optimizer: torch.optim.Optimizer) -> bool:
    return any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)


def groups_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of the optimizer's groups, which schedules change, as JSON."""
    return [
        {key: to_json(value, where="the optimizer") for key, value in group.items() if key not in _OF_THE_MACHINE}
        for group in optimizer.param_groups
    ]


def set_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give the optimizer's groups the settings that `groups_of` returned."""
    if len(groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"the checkpoint's optimizer has {len(groups)} groups of parameters, and the job's has "
            f"{len(optimizer.param_groups)}. Resume with the optimizer that it was saved from."
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key in _OF_THE_MACHINE:
                continue
            if isinstance(group.get(key), Tensor):
                group[key].copy_(torch.as_tensor(from_json(value)))
            else:
                group[key] = from_json(value)

"""The training state of a worker under DeepSpeed as slices of the job's own tensors, and back.

DeepSpeed lays parameters in rows, and a worker has a part of each row, with the optimizer's state for it. That is said
here in boxes of the parameters (parallel/deepspeed/slices.py): a checkpoint is then like any other, and can be gone on
with by any number of workers, and by torch's engines; or the other way round. Nothing is gathered for it.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from shoal.fault.shards import Found, Shard, whole_shard
from shoal.parallel.deepspeed.private import Held, held_of
from shoal.parallel.deepspeed.slices import boxes
from shoal.parallel.deepspeed.start import DeepSpeedLayout

_NUMBER = ":number"
"""Marks what was a number of Python, not a tensor: see `saved_optimizer`."""


def deepspeed_model_shards(
    layout: DeepSpeedLayout, optimizer: torch.optim.Optimizer, *, is_first: bool
) -> Iterator[Shard]:
    """Yield what this worker holds of the parameters: to save, and all that must change where another state is read.

    The numbers of a row are those that count. What the model computes with is a copy of them, which is not saved.
    """
    for name, parameter in layout.model.named_parameters():
        shape, held = layout.shapes[name], held_of(parameter, optimizer)
        full = f"model/{name}"
        if held is not None and held.row is not None:
            yield from _cut(full, held.of(held.row), shape, held)
        if held is not None and held.computed is not None:
            yield from _cut(full, held.computed, shape, held, is_mine=held.row is None)
        if parameter.numel() == math.prod(shape):
            is_alike = not parameter.requires_grad and not hasattr(parameter, "ds_id")
            yield whole_shard(full, parameter.detach().view(shape), is_mine=is_alike and is_first)


def deepspeed_optimizer_shards(layout: DeepSpeedLayout, optimizer: torch.optim.Optimizer) -> Iterator[Shard]:
    """Yield the slices of the optimizer's state that this worker holds: "optimizer/KEY/NAME"."""
    for name, held in _trained(layout, optimizer):
        assert held.row is not None
        for key, value in optimizer.state.get(held.row, {}).items():
            if isinstance(value, Tensor) and value.shape == held.row.shape:
                yield from _cut(f"optimizer/{key}/{name}", held.of(value), layout.shapes[name], held)
            elif held.first == 0 and isinstance(value, Tensor):  # one for the row, and so for all its parameters
                yield whole_shard(f"optimizer/{key}/{name}", value.detach())
            elif held.first == 0 and isinstance(value, (bool, int, float)):
                yield whole_shard(f"optimizer/{key}{_NUMBER}/{name}", torch.tensor(value, dtype=torch.float64))


def make_deepspeed_room(
    layout: DeepSpeedLayout, optimizer: torch.optim.Optimizer, found: Mapping[str, Found]
) -> tuple[list[Shard], Callable[[], None]]:
    """Give the optimizer the state that `found` has, without its numbers yet.

    Return the slices to fill, and what to call when they are.
    """
    keys: dict[str, list[str]] = {}
    for full in found:
        kind, _, rest = full.partition("/")
        if kind == "optimizer":
            key, _, name = rest.partition("/")
            keys.setdefault(name, []).append(key)
    wanted: list[Shard] = []
    numbers: list[tuple[dict[str, Any], str, Tensor]] = []
    optimizer.state.clear()
    for name, held in _trained(layout, optimizer):
        assert held.row is not None
        state = optimizer.state[held.row]
        for key in keys.get(name, []):
            full, plain = f"optimizer/{key}/{name}", key.removesuffix(_NUMBER)
            saved = found[full]
            if saved.shape == layout.shapes[name] and key != "step":
                if key not in state:
                    state[key] = torch.zeros_like(held.row, dtype=saved.dtype).detach()
                wanted += _cut(full, held.of(state[key]), layout.shapes[name], held)
            elif plain not in state:
                state[plain] = torch.empty(saved.shape, dtype=saved.dtype, device=_place_of(key, held.row, optimizer))
                wanted.append(whole_shard(full, state[plain]))
                if key != plain:
                    numbers.append((state, plain, state[plain]))

    def finish() -> None:
        for state, key, room in numbers:
            value = room.item()
            state[key] = int(value) if value == int(value) else value

    return wanted, finish


def _trained(layout: DeepSpeedLayout, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Held]]:
    for name, parameter in layout.parameters.items():
        held = held_of(parameter, optimizer)
        if held is not None and held.row is not None:
            yield name, held


def _cut(name: str, row: Tensor, shape: tuple[int, ...], held: Held, *, is_mine: bool = True) -> Iterator[Shard]:
    """Yield the boxes that are `row`, some numbers of the flattened tensor `name`."""
    for box in boxes(shape, held.first, held.count):
        piece = row.narrow(0, box.start, math.prod(box.sizes)).view(box.sizes)
        yield Shard(name, piece, shape, box.offset, is_mine=is_mine)


def _place_of(key: str, row: Tensor, optimizer: torch.optim.Optimizer) -> torch.device:
    """Return where an optimizer wants what it keeps once for a row: counts of steps lie with the processor, mostly."""
    is_on_device = any(group.get("capturable") or group.get("fused") for group in optimizer.param_groups)
    return row.device if is_on_device or key != "step" else torch.device("cpu")

"""From a model on the meta device, already cut for this worker, to one with numbers: slice by slice.

1. Each parameter's slice gets memory on the worker's device.
2. One parameter after the other is made whole on the processor, its slice copied, and the rest forgotten.

The slice of the tensor axis is cut first, then that of the shard axis, by the first dim, as the engines do it.
Example: a weight of 12 x 4 under shard=2, tensor=3, divided by columns: tensor worker 1 has rows 4 to 7, of which shard
worker 0 has 4 and 5.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Whole: TypeAlias = Callable[[str], torch.Tensor]
"""Returns the numbers of a parameter or buffer, by its name in the job's model, on the processor."""
Slice: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
"""Returns this worker's slice, along the tensor axis, of the parameter `name`, given whole."""
Places: TypeAlias = Mapping[str, list[tuple[nn.Module, str]]]
"""For each parameter, by the first of its names, the modules and attributes that hold it."""


def find_places(model: nn.Module, root: nn.Module | None = None) -> dict[str, list[tuple[nn.Module, str]]]:
    """Return where the parameters of `model` are held in `root` (default: all of it); a tied one in several places."""
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, list[tuple[nn.Module, str]]] = {}
    for module in (root or model).modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(first_names[id(parameter)], []).append((module, attribute))
    return places


def parameter_at(places: Places, name: str) -> nn.Parameter:
    """Return the parameter `name` as it is now."""
    module, attribute = places[name][0]
    parameter = module._parameters[attribute]
    assert parameter is not None
    return parameter


def allocate(root: nn.Module, places: Places, *, device: torch.device) -> None:
    """Give every parameter of `root` memory, without numbers yet, on `device`; what is tied stays tied."""
    # Not to_empty, which would put rubbish into the buffers.
    root._apply(lambda t: torch.empty_like(t, device=device) if isinstance(t, nn.Parameter) else t)  # type: ignore[no-untyped-call]
    for name in places:
        parameter = parameter_at(places, name)
        for module, attribute in places[name][1:]:
            module._parameters[attribute] = parameter


@torch.no_grad()
def fill(places: Places, whole: Whole, *, slice_of: Slice | None, shard: int, shards: int) -> None:
    """Copy into each parameter this worker's slice of its numbers."""
    for name in places:
        numbers = whole(name)
        if slice_of is not None:
            numbers = slice_of(name, numbers)
        parameter = parameter_at(places, name).detach()
        if isinstance(parameter, DTensor):
            parameter = parameter._local_tensor
            if shards > 1 and parameter.shape != numbers.shape:
                numbers = shard_of(numbers, shard=shard, shards=shards)
        parameter.copy_(numbers)


def fill_buffers(model: nn.Module, whole: Whole, *, device: torch.device) -> None:
    """Give every buffer its numbers."""
    for prefix, module in model.named_modules():
        for attribute, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[attribute] = whole(f"{prefix}.{attribute}" if prefix else attribute).to(device)


def shard_of(numbers: torch.Tensor, *, shard: int, shards: int) -> torch.Tensor:
    """Return slice number `shard` along the first dim, as FSDP2 cuts it: slices of equal size, the last ones short."""
    rows = numbers.shape[0]
    each = -(-rows // shards)
    return numbers[min(rows, shard * each) : min(rows, (shard + 1) * each)]

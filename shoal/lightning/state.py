"""The state of a module that is laid out over workers, whole and back: what Lightning's checkpoints hold.

A checkpoint is that of one process, whatever wrote it: any number of workers under any plan goes on with it, and so
does Lightning without shoal. Lightning alone refuses a checkpoint that tells where a loader stands if the one at hand
cannot go there, as a DataLoader cannot: so that is kept under a name of its own.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from shoal.core.errors import ConfigError
from shoal.lightning.laying import Laid
from shoal.parallel.layout import local_of

_PLACES = "shoal_loaders"
"""Where a checkpoint has what Lightning keeps of its loaders."""


def set_places_apart(checkpoint: dict[str, Any]) -> None:
    """Put where the loaders stand to where Lightning alone does not look."""
    loop = checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})
    if "combined_loader" in loop:
        checkpoint[_PLACES] = loop.pop("combined_loader")


def bring_places_back(checkpoint: dict[str, Any]) -> None:
    """Put it back to where Lightning looks."""
    if _PLACES in checkpoint:
        checkpoint["loops"]["fit_loop"]["state_dict"]["combined_loader"] = checkpoint.pop(_PLACES)


def module_state(laid: Laid, *, keeps: bool) -> dict[str, Any]:
    """Return the module's whole state_dict where this worker `keeps` it, on the processor. Called by every worker."""
    whole: dict[str, Any] = {}
    parameters = dict(laid.module.named_parameters(remove_duplicate=False))
    for name, value in laid.module.state_dict().items():
        held = value
        if name in parameters:
            held = laid.layout.whole_of(f"module.{laid.names[name]}", value, local_of(value))
        if keeps:
            whole[name] = held.detach().cpu() if isinstance(held, Tensor) else held
    return whole


@torch.no_grad()
def load_module_state(laid: Laid, state: Mapping[str, Any], *, strict: bool) -> None:
    """Give the module, which is cut, its slices of the whole `state`."""
    held = laid.module.state_dict()
    missing, unexpected = held.keys() - state.keys(), state.keys() - held.keys()
    if strict and (missing or unexpected):
        raise ConfigError(
            f"the checkpoint is of another module: it lacks {_listed(missing)}, and has {_listed(unexpected)} beyond. "
            "Load it into the module that it was saved from."
        )
    for name in held.keys() & state.keys():
        if not isinstance(held[name], Tensor):
            continue
        part = state[name]
        if name in laid.names:
            part = laid.layout.part_of(f"module.{laid.names[name]}", held[name], part)
        local_of(held[name]).copy_(part)


def optimizer_state(laid: Laid, optimizer: torch.optim.Optimizer, *, keeps: bool) -> dict[str, Any]:
    """Return the optimizer's whole state_dict where this worker `keeps` it. Called by every worker."""
    state = optimizer.state_dict()
    whole: dict[Any, dict[str, Any]] = {}
    for number, name, _, sharded in _parameters(laid, optimizer):
        values = {}
        for key, value in state["state"].get(number, {}).items():
            gathered = _whole(laid, name, sharded, value)
            values[key] = gathered.cpu() if isinstance(gathered, Tensor) else gathered
        if values:
            whole[number] = values
    return {"state": whole, "param_groups": state["param_groups"]} if keeps else {}


def load_optimizer_state(laid: Laid, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give the optimizer its slices of the whole `state`."""
    own: dict[Any, dict[str, Any]] = {}
    for number, name, local, sharded in _parameters(laid, optimizer):
        if number in state["state"]:
            own[number] = {
                key: _part(laid, name, local, sharded, value) for key, value in state["state"][number].items()
            }
    optimizer.load_state_dict({"state": own, "param_groups": state["param_groups"]})


def _parameters(laid: Laid, optimizer: torch.optim.Optimizer) -> list[tuple[int, str, nn.Parameter, nn.Parameter]]:
    """Return the optimizer's parameters in the order of its state_dict: number, name in the layout, its own, whose."""
    names = {id(parameter): name for name, parameter in laid.layout.parameters.items()}
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    pairs = [(local, laid.sharded_of(local)) for local in every]
    return [(number, names.get(id(sharded), ""), local, sharded) for number, (local, sharded) in enumerate(pairs)]


def _whole(laid: Laid, name: str, parameter: nn.Parameter, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if isinstance(value, DTensor) and value.shape != parameter.shape:
        return value.full_tensor()  # rows' or columns' means
    if local_of(value).shape == local_of(parameter.detach()).shape:
        return laid.layout.whole_of(name, parameter.detach(), local_of(value))
    return value


def _part(laid: Laid, name: str, local: nn.Parameter, sharded: nn.Parameter, value: Any) -> Any:
    """Return what the optimizer, which has `local`, is to hold of the whole `value` for the parameter `sharded`."""
    if not isinstance(value, Tensor) or value.dim() == 0 or not isinstance(sharded, DTensor):
        return value
    if value.shape == sharded.shape:
        part = laid.layout.part_of(name, sharded, value)
        if not isinstance(local, DTensor):
            return part
        there = part.to(local._local_tensor.device)
        return DTensor.from_local(
            there, local.device_mesh, local.placements, shape=local.shape, stride=local.stride(), run_check=False
        )
    if not isinstance(local, DTensor):
        return value
    there = value.to(local._local_tensor.device)
    return DTensor.from_local(there, local.device_mesh, [Replicate()] * local.device_mesh.ndim, run_check=False)


def _listed(names: set[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (" ..." if len(names) > 3 else "") if names else "nothing"

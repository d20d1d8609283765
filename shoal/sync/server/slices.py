"""How the parameters are cut among servers, and the job's optimizer rebuilt over a cut.

1. All parameters lie end to end, in the order of their names in the model. Server k of K owns the k-th of K equal
   stretches (equal to one element), so a large parameter is cut and small ones share a server.
2. An optimizer that treats every number by itself does the same on a piece as on the whole: each server has one of the
   same class, with the same groups and settings, over its pieces.

Example: parameters of 6, 1 and 5 elements, 2 servers. Server 0 owns all 6 of the first; server 1 the second and the
third. With 3 servers: 4; 2 + 1 + 1; 4.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import PlanError

OPTIMIZERS = {
    kind.__name__: kind
    for kind in (
        torch.optim.ASGD, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW,
        torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop,
        torch.optim.SGD,
    )
}  # fmt: skip
"""Those of torch that treat every number by itself. A subclass may not: only these very classes count."""
SCALARS = frozenset({"step", "mu_product", "eta", "mu"})
"""What they keep that is one number for a whole parameter."""
_OF_THE_MACHINE = frozenset({"params", "foreach", "fused", "capturable", "differentiable", "initial_lr"})


@dataclass(frozen=True)
class Piece:
    """A stretch of one parameter."""

    parameter: int
    """Which, in the order of the names."""
    begin: int
    end: int
    group: int
    """In which of the optimizer's groups."""


@dataclass(frozen=True)
class Slice:
    """What one server owns: elements `begin` to `end` of all parameters laid end to end."""

    number: int
    begin: int
    end: int
    pieces: tuple[Piece, ...]

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return self.end - self.begin


def cut(numels: Sequence[int], groups: Sequence[int], count: int) -> list[Slice]:
    """Return `count` equal slices of parameters of these sizes, which are in these groups of the optimizer."""
    total, found = sum(numels), []
    if count > total:
        raise PlanError(f"sync.servers={count}, but the model has {total} numbers to train. Use fewer servers.")
    for number in range(count):
        begin, end, at, pieces = total * number // count, total * (number + 1) // count, 0, []
        for parameter, (numel, group) in enumerate(zip(numels, groups, strict=True)):
            first, last = max(begin, at), min(end, at + numel)
            if first < last:
                pieces.append(Piece(parameter, first - at, last - at, group))
            at += numel
        found.append(Slice(number, begin, end, tuple(pieces)))
    return found


def groups_of(parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> list[int]:
    """Return in which of the optimizer's groups each parameter is; refuse what cannot be cut, by name."""
    if type(optimizer) not in OPTIMIZERS.values():
        raise PlanError(
            f"sync.mode='server' cuts parameters among servers, and {type(optimizer).__name__} may look at whole ones. "
            f"Use one of {', '.join(sorted(OPTIMIZERS))}, or sync.mode='all-reduce'."
        )
    of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    missing = [name for name, parameter in parameters.items() if id(parameter) not in of]
    if missing:
        raise PlanError(f"the optimizer does not train {missing[0]}. Give it all parameters, or freeze that one.")
    kinds = sorted({str(parameter.dtype) for parameter in parameters.values()})
    if len(kinds) > 1 or not all(parameter.dtype.is_floating_point for parameter in parameters.values()):
        raise PlanError(f"sync.mode='server' needs parameters of one floating-point type, not {', '.join(kinds)}.")
    return [of[id(parameter)] for parameter in parameters.values()]


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return what each group of the optimizer is set to now, as JSON carries it."""
    return [
        {name: _plain(value) for name, value in group.items() if name not in _OF_THE_MACHINE}
        for group in optimizer.param_groups
    ]


def build_optimizer(name: str, settings: Sequence[dict[str, Any]], pieces: Sequence[tuple[Tensor, int]]) -> Any:
    """Return the optimizer of that name over flat pieces, each of which is in one group."""
    groups = [
        {**_tuples(group), "params": [piece for piece, of in pieces if of == number]}
        for number, group in enumerate(settings)
    ]
    return OPTIMIZERS[name](groups)


def set_groups(optimizer: torch.optim.Optimizer, settings: Sequence[dict[str, Any]]) -> None:
    """Set the groups of `optimizer`."""
    for group, values in zip(optimizer.param_groups, settings, strict=True):
        group.update(_tuples(values))


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) else value


def _tuples(group: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in group.items()}

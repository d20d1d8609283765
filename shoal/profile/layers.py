"""The layers of a model: the modules that run one after the other, and those of them that repeat.

1. A run is two or more neighbours in a ModuleList or Sequential that are built alike: same classes, same shapes.
2. The members of a run are layers. What holds a run is opened, and so are the model itself and every Sequential and
   ModuleList outside of runs; all other modules are layers as they stand.

Example: GPT(wte, wpe, h = ModuleList of 12 Blocks, ln_f, head) has 16 layers, and h.0 to h.11 are a run.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

KEPT = 4
"""How many members of a run are traced: the first and the last, and two between them that must come out alike."""


@dataclass(frozen=True)
class Run:
    """Neighbours `start` to `stop` (exclusive) of `container`, built alike."""

    name: str
    container: nn.Module
    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many members it has."""
        return self.stop - self.start

    def members(self) -> list[nn.Module]:
        """Return its layers, in order."""
        return list(self.container.children())[self.start : self.stop]


def find_layers(model: nn.Module) -> tuple[dict[str, nn.Module], list[Run]]:
    """Return the layers by name, in the order in which they are registered, and the runs among them."""
    layers: dict[str, nn.Module] = {}
    runs: list[Run] = []
    _open("", model, layers, runs)
    return layers, runs


@contextlib.contextmanager
def cut_short(runs: list[Run]) -> Iterator[dict[int, int]]:
    """Take the middle out of every long run; yield how many members each kept second member (by id) stands for."""
    weights: dict[int, int] = {}
    containers = {id(run.container): run.container for run in runs}
    before = {key: dict(container._modules) for key, container in containers.items()}
    try:
        for key, container in containers.items():
            kept = _kept(before[key], [run for run in runs if run.container is container], weights)
            container._modules = {str(index): module for index, module in enumerate(kept)}
        yield weights
    finally:
        for key, container in containers.items():
            container._modules = before[key]


def _kept(modules: dict[str, Any], runs: list[Run], weights: dict[int, int]) -> list[Any]:
    members = list(modules.values())
    dropped: set[int] = set()
    for run in runs:
        if run.length > KEPT:
            second = members[run.start + 1]
            weights[id(second)] = run.length - KEPT + 1
            dropped.update(range(run.start + KEPT // 2, run.stop - KEPT // 2))
    return [member for index, member in enumerate(members) if index not in dropped]


def _open(path: str, module: nn.Module, layers: dict[str, nn.Module], runs: list[Run]) -> None:
    found = _runs_in(path, module)
    runs += found
    in_runs = {index for run in found for index in range(run.start, run.stop)}
    for index, (name, child) in enumerate(module.named_children()):
        full_name = f"{path}.{name}" if path else name
        if index not in in_runs and (isinstance(child, (nn.Sequential, nn.ModuleList)) or _holds_a_run(child)):
            _open(full_name, child, layers, runs)
        else:
            layers[full_name] = child


def _runs_in(path: str, module: nn.Module) -> list[Run]:
    if not isinstance(module, (nn.Sequential, nn.ModuleList)):
        return []
    shapes = [_shape_of(child) for child in module.children()]
    runs, start = [], 0
    for index in range(1, len(shapes) + 1):
        if index == len(shapes) or shapes[index] != shapes[start]:
            if index - start > 1 and shapes[start][2]:
                runs.append(Run(path, module, start, index))
            start = index
    return runs


def _holds_a_run(module: nn.Module) -> bool:
    return any(_runs_in("", descendant) for descendant in module.modules())


def _shape_of(module: nn.Module) -> tuple[Any, ...]:
    classes = tuple(type(descendant) for descendant in module.modules())
    settings = tuple(descendant.extra_repr() for descendant in module.modules())
    shapes = tuple((tuple(p.shape), p.dtype, p.requires_grad) for p in module.parameters())
    return classes, settings, shapes

"""The blocks of a model: the modules in which tensor parallelism looks for pairs of products, and which it divides.

1. What stands beside the members of a run (profile/layers.py), and the members themselves.
2. Without runs: the members of every ModuleList. Without those: the layers. At last the model itself.

Only those count that have a pair. Example: the first block of T5 has one embedding more than the others; it is no
member of their run, but stands beside them.
"""

from collections.abc import Iterable, Iterator

from torch import nn

from shoal.profile.layers import find_layers
from shoal.profile.pairs import find_pairs


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of `model` by name, in their order; none lies inside another. There may be none."""
    layers, runs = find_layers(model)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for members in (_members(model, {run.name for run in runs}), _members(model, lists), layers.items()):
        blocks = {name: module for name, module in members if find_pairs(module)}
        if blocks:
            return {name: module for name, module in blocks.items() if not _has_outer(name, blocks)}
    return {} if runs else {"": model}  # two members of a run, each with half of a pair, are no pair


def is_inside(name: str, other: str) -> bool:
    """Return whether the module `name` lies inside the module `other`."""
    return other == "" or name.startswith(f"{other}.")


def _members(model: nn.Module, holders: Iterable[str]) -> Iterator[tuple[str, nn.Module]]:
    for holder in holders:
        yield from (
            (f"{holder}.{name}" if holder else name, child)
            for name, child in model.get_submodule(holder).named_children()
        )


def _has_outer(name: str, blocks: Iterable[str]) -> bool:
    return any(other != name and is_inside(name, other) for other in blocks)

"""What tensor parallelism would divide in a layer: pairs of products, the first split by columns, the second by rows.

1. A child of the layer with two linears or more (attention, an MLP) is a pair: it begins where the child begins, and
   its last linear joins the parts again. A ModuleList is no child, its members are: it only holds them.
2. Linears left over, and children with one linear each, make pairs in the order in which they stand.

Between the beginning of a pair and its last linear every worker computes, and keeps, only its part.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True)
class Pair:
    """From where on a layer is divided, and the linear that joins it."""

    start: nn.Module
    joins: nn.Module


def find_pairs(layer: nn.Module) -> list[Pair]:
    """Return the pairs of `layer`."""
    if isinstance(layer, (nn.Linear, nn.MultiheadAttention)):
        return []
    pairs: list[Pair] = []
    single: list[tuple[nn.Module, nn.Module]] = []
    for child in _children(layer):
        linears = list(linears_in(child))
        if isinstance(child, nn.MultiheadAttention) or len(linears) > 1:
            pairs.append(Pair(child, linears[-1]))
        elif linears:
            single.append((child, linears[0]))
    pairs += [Pair(first, joins) for (first, _), (_, joins) in zip(single[::2], single[1::2], strict=False)]
    return pairs


def _children(layer: nn.Module) -> Iterator[nn.Module]:
    for child in layer.children():
        if isinstance(child, nn.ModuleList):
            yield from _children(child)
        else:
            yield child


def linears_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the linear layers in `module`, also Hugging Face's Conv1D, which is one by another name."""
    for descendant in module.modules():
        if isinstance(descendant, nn.Linear) or type(descendant).__name__ == "Conv1D":
            yield descendant


def split_parameters(pairs: list[Pair], layer: nn.Module) -> int:
    """Return how many numbers of `layer` lie in products that are divided."""
    if not pairs:
        return 0
    divided = [module for module in layer.modules() if isinstance(module, nn.MultiheadAttention)]
    weights = {id(p): p.numel() for module in [*linears_in(layer), *divided] for p in module.parameters()}
    return sum(weights.values())

"""Why a model cannot be divided over so many workers, said so that a person can mend it."""

import inspect
import math
from collections.abc import Mapping
from pathlib import Path

from torch import nn

from shoal.core.errors import PlanError
from shoal.parallel.tensor.style import Style, features, is_divisible_linear
from shoal.profile.layers import find_layers
from shoal.profile.pairs import linears_in

_MOST = 8
"""Degrees are named up to this one: tensor parallelism stays within a node, and a node has 8 devices, as a rule."""


def refuse_indivisible(
    model: nn.Module, plan: Mapping[str, Style], *, tensor: int, heads: set[tuple[str, str, int]]
) -> None:
    """Raise PlanError if `tensor` does not divide the heads (module, attribute, number) or the features of `plan`."""
    numbers = [(number, f"{attribute}={number} of {name or 'the model'}") for name, attribute, number in sorted(heads)]
    for name, style in plan.items():
        if style.kind in ("column", "row"):
            taken, given = features(model.get_submodule(name))
            word, size = ("out_features", given) if style.kind == "column" else ("in_features", taken)
            numbers += [(each, f"{word}={size} of {name}") for each in style.sections or (size,)]
    divisor = math.gcd(*(number for number, _ in numbers))
    for number, what in numbers:
        if number % tensor:
            raise PlanError(f"tensor={tensor} does not divide {what}. Use tensor={_choices(divisor)}.")


def nothing_divides(model: nn.Module) -> PlanError:
    """Return the error that names the layer which has most of what could be divided, and what to write."""
    layers = find_layers(model)[0] or {"": model}
    name, block = max(layers.items(), key=lambda item: len(list(linears_in(item[1]))))
    linears = list(linears_in(block))
    own = [type(linear).__name__ for linear in linears if not is_divisible_linear(linear)]
    have = {0: "no linear layer", 1: "a single linear layer"}.get(len(linears), f"{len(linears)} that make no pair")
    if own:
        have = f"layers of {own[0]}, which computes in a way of its own"
    return PlanError(
        f"tensor parallelism divides pairs of linear layers, and {name or 'the model'} ({_where(block)}) has {have}. "
        'Say what to divide in Job(tensor_plan={"blocks.*.up": "column", "blocks.*.down": "row"}), or use tensor=1.'
    )


def _where(module: nn.Module) -> str:
    """Return the class of `module` and the line that it is written on."""
    kind = type(module)
    try:
        return f"{kind.__name__}, {Path(inspect.getsourcefile(kind) or '').name} line {inspect.getsourcelines(kind)[1]}"
    except (OSError, TypeError):
        return kind.__name__


def _choices(divisor: int) -> str:
    degrees = [str(degree) for degree in range(1, _MOST + 1) if divisor % degree == 0]
    return degrees[0] if len(degrees) == 1 else f"{', '.join(degrees[:-1])} or {degrees[-1]}"

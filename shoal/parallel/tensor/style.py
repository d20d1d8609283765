"""The style of a module under tensor parallelism, and how a person writes it: Job(tensor_plan={pattern: style})."""

import fnmatch
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from shoal.core.errors import PlanError, did_you_mean

KINDS = ("column", "row", "vocab", "head", "opaque")


@dataclass(frozen=True)
class Style:
    """How a module is divided; `sections` are the sizes of what a packed column computes, each divided on its own."""

    kind: str
    sections: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise PlanError(f"a style of tensor parallelism is one of {', '.join(KINDS)}, not {self.kind!r}.")


def read_tensor_plan(asked: Mapping[str, str], model: nn.Module) -> dict[str, Style]:
    """Return the style of each module that a pattern of `asked`, a Job's tensor_plan, names; later patterns win.

    {"blocks.*.up": "column", "blocks.*.qkv": "column:3", "blocks.*.attn": "opaque"}. Raises PlanError.
    """
    plan: dict[str, Style] = {}
    modules = dict(model.named_modules())
    for pattern, words in asked.items():
        names = [name for name in modules if name and fnmatch.fnmatchcase(name, pattern)]
        if not names:
            raise PlanError(
                f"tensor_plan: no module of the model is named {pattern!r}.{did_you_mean(pattern, _patterns(modules))}"
            )
        plan |= {name: _read_style(words, name, modules[name]) for name in names}
    return plan


def _read_style(words: str, name: str, module: nn.Module) -> Style:
    """Return the style that "column", "column:3" or "column:64,16,16" asks for `module`."""
    kind, _, counts = words.partition(":")
    if kind not in KINDS:
        raise PlanError(f"tensor_plan: {words!r} of {name} is no style.{did_you_mean(kind, list(KINDS))}")
    needed = {"vocab": "an nn.Embedding", "opaque": ""}.get(kind, "an nn.Linear")
    is_good = {"vocab": type(module) is nn.Embedding, "opaque": True}.get(kind, is_divisible_linear(module))
    if not is_good:
        raise PlanError(f"tensor_plan: {kind!r} divides {needed}, and {name} is a {type(module).__name__}.")
    if not counts:
        return Style(kind)
    given = features(module)[1] if kind == "column" else 0
    try:
        sizes = tuple(int(count) for count in counts.split(","))
    except ValueError:
        sizes = ()
    if len(sizes) == 1 and sizes[0] > 0 and given % sizes[0] == 0:
        sizes = (given // sizes[0],) * sizes[0]
    if not given or sum(sizes) != given or min(sizes) < 1:
        raise PlanError(
            f"tensor_plan: {words!r} of {name} does not say how {given} features are packed. "
            'Write "column:3" for 3 equal sections, or their sizes, as in "column:64,16,16".'
        )
    return Style(kind, sizes)


def _patterns(modules: Iterable[str]) -> list[str]:
    """Return the names of `modules` as patterns: with * in the place of numbers."""
    return sorted({re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in modules if name})


def is_divisible_linear(module: nn.Module) -> bool:
    """Return whether `module` is a linear as torch or Hugging Face wrote it, with its weight as a parameter."""
    is_plain = type(module).forward is nn.Linear.forward or type(module).__name__ == "Conv1D"
    return is_plain and module._parameters.get("weight") is not None


def features(module: nn.Module) -> tuple[int, int]:
    """Return how many features a linear takes and gives."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (columns, rows) if isinstance(module, (nn.Linear, nn.Embedding)) else (rows, columns)

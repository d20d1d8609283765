"""Which products of a model are divided, and how: found from the plan that the model carries, or from its structure.

1. The blocks of the model (parallel/tensor/blocks.py) are looked at.
2. A Hugging Face model says which of its linears are columns and rows. In other models the last linear of a pair
   (profile/pairs.py) is the row, those before it are columns.
3. Columns that are packed (queries, keys and values in one) have sections; parallel/tensor/watch.py sees them.
4. The token embedding, and the head that gives one number per token, are divided by rows, if both are there.
5. Everything must divide: heads, heads of keys, features. Otherwise the degrees that would do are named.

Example: GPT of width 64 with 4 heads, tensor=2: blocks.0.query_key_value is a column in sections (64, 64, 64),
blocks.0.attention_out a row, token "vocab", out "head".
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from shoal.parallel.tensor.blocks import find_blocks, is_inside
from shoal.parallel.tensor.refusal import nothing_divides, refuse_indivisible
from shoal.parallel.tensor.style import Style, features, is_divisible_linear, read_tensor_plan
from shoal.parallel.tensor.watch import Sample, watch_sections
from shoal.profile.pairs import find_pairs, linears_in
from shoal.profile.vocabulary import find_vocabularies

__all__ = ["Style", "find_tensor_plan", "read_tensor_plan"]

_OPAQUE = (nn.MultiheadAttention, nn.RNNBase, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.Embedding)
"""Modules of a block that run whole: what they compute inside is not seen from outside, or is not a product.

Of embeddings (T5's of distances) DTensor loses the backward: it waits for a mask that nobody has made (torch 2.13).
"""

_CARRIED = {
    "colwise": "column",
    "colwise_rep": "column",
    "colwise_gather_output": "column",
    "packed_colwise": "column",
    "rowwise": "row",
    "rowwise_rep": "row",
    "rowwise_split_input": "row",
    "packed_rowwise": "row",
}
_HARMLESS = ("replicated_with_grad_allreduce", "sequence_parallel", "replicate")
"""Carried styles that say nothing about what is divided: such modules are whole here, and their gradients summed."""


def find_tensor_plan(
    model: nn.Module, *, tensor: int, asked: Mapping[str, str] | None = None, sample: Sample | None = None
) -> dict[str, Style]:
    """Return the style of each module that is divided over `tensor` workers, by name.

    `model` may be on the meta device. `asked`, a Job's tensor_plan, goes before what is found; `sample` runs the model
    that it is given, a fake copy. Raises PlanError if `tensor` does not divide it, or nothing in it can be divided.
    """
    blocks = find_blocks(model)
    wanted = read_tensor_plan(asked or {}, model)
    found = _carried(model, blocks) or _structural(blocks)
    kinds = _without_opaque(found | _opaque(blocks) | {name: style.kind for name, style in wanted.items()})
    if not {"column", "row"} & set(kinds.values()):
        raise nothing_divides(model)
    plan = _planned(model, blocks, kinds, sample=sample)
    plan |= {name: style for name, style in wanted.items() if name in plan and (style.sections or name not in found)}
    heads = {item for name in plan if plan[name].kind == "column" for item in _heads_near(model, name)}
    refuse_indivisible(model, plan, tensor=tensor, heads=heads)
    return plan | _vocabulary(model, plan, tensor=tensor)


def _planned(
    model: nn.Module, blocks: Mapping[str, nn.Module], kinds: Mapping[str, str], *, sample: Sample | None
) -> dict[str, Style]:
    """Return the styles of modules that have `kinds`, with the sections of those that are packed."""
    heads = {n: [number for *_, number in _heads_near(model, n)] for n, kind in kinds.items() if kind == "column"}
    seen = watch_sections(model, heads=heads, blocks=_widths(blocks, kinds), sample=sample)
    fitting = {n: sizes for n, sizes in seen.items() if sum(sizes) == features(model.get_submodule(n))[1]}
    return {name: Style(kind, fitting.get(name, ())) for name, kind in kinds.items()}


def _without_opaque(kinds: Mapping[str, str]) -> dict[str, str]:
    """Return `kinds` less what lies inside a module that runs whole."""
    opaque = [name for name, kind in kinds.items() if kind == "opaque"]
    return {n: kind for n, kind in kinds.items() if not any(n.startswith(f"{other}.") for other in opaque)}


def _structural(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    kinds: dict[str, str] = {}
    for block_name, block in blocks.items():
        names = {id(module): name for name, module in block.named_modules(prefix=block_name)}
        for pair in find_pairs(block):
            columns = [linear for linear in linears_in(pair.start) if linear is not pair.joins]
            is_opaque = isinstance(pair.start, _OPAQUE)
            if not is_opaque and columns and all(map(is_divisible_linear, [*columns, pair.joins])):
                kinds |= dict.fromkeys((names[id(linear)] for linear in columns), "column")
                kinds[names[id(pair.joins)]] = "row"
    return kinds


def _carried(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return what the plan of a Hugging Face model says about its blocks; nothing if it carries none."""
    kinds: dict[str, str] = {}
    whole: list[str] = []
    for pattern, style in _carried_patterns(model):
        for name, module in model.named_modules():
            block = next((block for block in blocks if name.startswith(f"{block}.")), None)
            if block is None or not pattern.fullmatch(name):
                continue
            if style in _CARRIED and is_divisible_linear(module):
                kinds[name] = _CARRIED[style]
            elif style not in _HARMLESS:
                whole.append(block + "." + name.removeprefix(f"{block}.").split(".")[0])
    kept = {name: kind for name, kind in kinds.items() if not any(name.startswith(f"{start}.") for start in whole)}
    return kept | dict.fromkeys(whole, "opaque") if kept else {}


def _carried_patterns(model: nn.Module) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield the names that a carried plan means, which may be relative to the base model, and their styles."""
    for module in model.modules():
        config = getattr(module, "config", None)
        prefix = next(name for name, other in model.named_modules() if other is module)
        carried: Any = getattr(config, "base_model_tp_plan", None)
        if not isinstance(carried, Mapping):
            continue
        for name, style in carried.items():
            pattern = re.escape(name).replace(r"\*", r"[^.]+")
            yield (
                re.compile(rf"(?:{re.escape(prefix)}\.)?(?:{getattr(module, 'base_model_prefix', '')}\.)?{pattern}"),
                style,
            )
        return


def _opaque(blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the modules of `blocks` that always run whole."""
    modules = [item for block_name, block in blocks.items() for item in block.named_modules(prefix=block_name)]
    return {name: "opaque" for name, module in modules if isinstance(module, _OPAQUE)}


def _widths(blocks: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> dict[str, int]:
    """Return what width each block with columns takes: that of its first column's input."""
    widths: dict[str, int] = {}
    for block_name, block in blocks.items():
        for name, module in block.named_modules(prefix=block_name):
            if kinds.get(name) == "column" and block_name:
                widths.setdefault(block_name, features(module)[0])
    return widths


_HEADS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads")
_KEY_HEADS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads")


def _heads_near(model: nn.Module, name: str) -> list[tuple[str, str, int]]:
    """Return the numbers of heads that the module around the linear `name` has: (module, attribute, number)."""
    path = name.split(".")
    for length in range(len(path) - 1, -1, -1):
        owner = ".".join(path[:length])
        module = model.get_submodule(owner)
        found = [_number(module, names) for names in (_HEADS, _KEY_HEADS)]
        if any(found):
            return [(owner, *item) for item in found if item is not None]
        if isinstance(module, (nn.ModuleList, nn.Sequential)):
            break
    return []


def _number(module: nn.Module, names: tuple[str, ...]) -> tuple[str, int] | None:
    """Return the first of the attributes `names` that is a number; an attention without them says so in its config."""
    is_attention = "attention" in type(module).__name__.lower() or "attn" in type(module).__name__.lower()
    for holder in (module, getattr(module, "config", None) if is_attention else None):
        for name in names:
            number = getattr(holder, name, None)
            if isinstance(number, int) and not isinstance(number, bool) and number > 0:
                return name, number
    return None


def _vocabulary(model: nn.Module, plan: Mapping[str, Style], *, tensor: int) -> dict[str, Style]:
    """Return the styles of the token embedding and of its head, if they can be divided."""
    for found in find_vocabularies(model, is_free=lambda name: name not in plan and _is_free(name, plan)):
        if found.rows % tensor == 0:
            kinds = dict.fromkeys(found.embeddings, "vocab") | dict.fromkeys(found.heads, "head")
            return {name: Style(kind) for name, kind in kinds.items()}
    return {}


def _is_free(name: str, plan: Mapping[str, Style]) -> bool:
    """Return whether `name` lies outside of what holds columns and rows."""
    return not any(is_inside(name, holder) for other in plan if (holder := other.rpartition(".")[0]))

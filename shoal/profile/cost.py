"""What one operation costs: arithmetic if it is a matrix product, a convolution or attention, else memory traffic.

A matrix product reads each number many times from the cache, so its time goes with its operations. Everything else
(additions, activations, norms, copies, the optimizer) reads and writes each number once, so its time goes with bytes.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shoal.profile.live import strided_tensors
from shoal.spec.profile import Product

_ATEN = torch.ops.aten

_ATTENTION = _ATEN._scaled_dot_product_flash_attention_for_cpu
_ATTENTION_BACKWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward
_GPU_ATTENTION = (_ATEN._scaled_dot_product_flash_attention, _ATEN._scaled_dot_product_efficient_attention)
_GPU_ATTENTION_BACKWARD = (
    _ATEN._scaled_dot_product_flash_attention_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward,
)


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> int:
    """Scores and their product with the values, for every head of the queries: keys and values may have fewer."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (width + value.shape[-1])


def _attention_backward_flops(
    _: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *__: Any, **___: Any
) -> int:
    """The scores once more, then four products: gradients of values, scores, queries and keys."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[-2] * (3 * width + 2 * value.shape[-1])


def _lstm_flops(inputs: torch.Tensor, *weights: Any, out_val: Any = None) -> int:  # noqa: ARG001 torch passes it
    products: int = weights[0].numel() + weights[1].numel()
    return 2 * inputs.shape[0] * inputs.shape[1] * products


def _lstm_backward_flops(*args: Any, out_val: Any = None) -> int:
    return 2 * _lstm_flops(*args, out_val=out_val)


_FORMULAS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    # Fused attention, also the CPU's, which torch does not count; torch 2.11 refuses fewer heads of keys.
    **dict.fromkeys((_ATTENTION, *_GPU_ATTENTION), _attention_flops),
    **dict.fromkeys((_ATTENTION_BACKWARD, *_GPU_ATTENTION_BACKWARD), _attention_backward_flops),
    _ATEN.mkldnn_rnn_layer: _lstm_flops,
    _ATEN.mkldnn_rnn_layer_backward: _lstm_backward_flops,
}
_SCORE_PASSES = {_ATTENTION: (3, 0), _ATTENTION_BACKWARD: (6, 1)}
"""How often fused attention reads and writes each score (scale, mask and softmax; the backward does these again, then
their gradients), and where its query stands among the arguments. Without it attention was predicted at a third of its
time, with it at two thirds (2 cores, 128 tokens, heads of 64, torch 2.13, 2026-11)."""
_PICKS = {"embedding", "index", "index_select", "gather", "nll_loss_forward", "nll_loss2d_forward"}
"""Operations that read of their first argument only what they return."""


_MATRICES = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
"""Plain matrix products, and where the first of the two matrices stands among the arguments."""


def is_product(func: Any) -> bool:
    """Return whether the time of `func` goes with its arithmetic."""
    return func.overloadpacket in _FORMULAS


class Cost:
    """The sums over the operations it is shown."""

    def __init__(self) -> None:
        self.flops = 0
        self.moved_bytes = 0
        self.operations = 0
        """How many of them do work; views do not."""
        self._products: Counter[Product] = Counter()

    def products(self) -> tuple[Product, ...]:
        """Return the plain matrix products, each shape once, with how many there were."""
        return tuple(dataclasses.replace(product, count=count) for product, count in self._products.items())

    def add(self, func: Any, args: Any, kwargs: Any, out: Any, new_bytes: int) -> None:
        """Count one operation; `new_bytes` is the size of those outputs that are not views of older tensors."""
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **kwargs, out_val=out)
            self._add_product(func.overloadpacket.__name__, args)
            moved_bytes = _score_bytes(func.overloadpacket, args)
        else:
            moved_bytes = _moved_bytes(func, args, kwargs, new_bytes)
        self.moved_bytes += moved_bytes
        self.operations += formula is not None or moved_bytes > 0

    def _add_product(self, name: str, args: Any) -> None:
        if name in _MATRICES:
            first, second = args[_MATRICES[name]], args[_MATRICES[name] + 1]
            batch = first.shape[0] if first.dim() == 3 else 1
            self._products[
                Product(rows=first.shape[-2], columns=second.shape[-1], inner=first.shape[-1], batch=batch)
            ] += 1


def _score_bytes(packet: Any, args: Any) -> int:
    if packet not in _SCORE_PASSES:
        return 0
    passes, first = _SCORE_PASSES[packet]
    query, key = args[first], args[first + 1]
    scores: int = query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]
    return passes * 2 * 4 * scores  # float32, whatever the inputs are


def _moved_bytes(func: Any, args: Any, kwargs: Any, new_bytes: int) -> int:
    name, changed = _traits(func)
    if "empty" in name:
        return 0
    changed_bytes = sum(map(_bytes, strided_tensors([_argument(args, kwargs, *where) for where in changed])))
    written_bytes = new_bytes + changed_bytes
    if written_bytes == 0:  # a view, or a question about a tensor
        return 0
    if name.endswith("_like") or name.startswith("new_"):  # the argument is only a pattern
        return written_bytes
    read = args[1:] if name in _PICKS else (args, kwargs)
    read_bytes = sum(map(_bytes, strided_tensors(read)))
    return read_bytes + written_bytes + (new_bytes if name in _PICKS else 0)


def _bytes(tensor: torch.Tensor) -> int:
    # The lesser of the two: an expanded tensor shows the same bytes many times, a slice only a part of its storage.
    return min(tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes())


@functools.cache
def _traits(func: Any) -> tuple[str, tuple[tuple[int, str], ...]]:
    arguments = enumerate(func._schema.arguments)
    changed = tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)
    return func.overloadpacket.__name__, changed


def _argument(args: Any, kwargs: Any, index: int, name: str) -> Any:
    return args[index] if index < len(args) else kwargs.get(name)

"""Recomputation: a block keeps less for its backward, and computes it again when that comes.

none       everything stays
selective  the results of matrix products and attention stay, all else is computed again: that is cheap
full       only the block's input stays

On torch.utils.checkpoint. The block's `forward` is wrapped, not the block: names and hooks stay as they are. What is
computed again moves no running statistics: batch norm has counted the samples already.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

Contexts: TypeAlias = Callable[[], tuple[Any, Any]]
"""Makes the contexts in which a forward runs, and in which it is computed again."""

_ATEN = torch.ops.aten
_PRODUCTS = {
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN.baddbmm.default,
    _ATEN.convolution.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
}


def apply_recompute(blocks: Iterable[nn.Module], kind: str, *, contexts: Contexts | None = None) -> None:
    """Make each of `blocks` keep only what `kind` says. In place; `contexts` are entered around both computations."""
    if kind == "none":
        return
    for block in blocks:
        block.forward = _recomputed(block, kind, contexts)


def _recomputed(block: nn.Module, kind: str, contexts: Contexts | None) -> Callable[..., Any]:
    forward = block.forward
    norms = [module for module in block.modules() if isinstance(module, _NormBase) and module.track_running_stats]
    both = functools.partial(_both_contexts, kind, contexts, norms)

    @functools.wraps(forward)
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=both, **kwargs)

    return recomputed


def _both_contexts(kind: str, contexts: Contexts | None, norms: list[_NormBase]) -> tuple[Any, Any]:
    pairs = [contexts()] if contexts else []
    if norms:
        pairs.append((contextlib.nullcontext(), _counted_already(norms)))
    if kind == "selective":
        pairs.append(create_selective_checkpoint_contexts(_policy))  # type: ignore[no-untyped-call]
    return _entered([pair[0] for pair in pairs]), _entered([pair[1] for pair in pairs])


@contextlib.contextmanager
def _entered(contexts: list[Any]) -> Any:
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


@contextlib.contextmanager
def _counted_already(norms: list[_NormBase]) -> Any:
    """Let what `norms` are given move copies of their running statistics."""
    held = [dict(norm._buffers) for norm in norms]
    for norm in norms:
        norm._buffers.update({name: b.clone() for name, b in norm._buffers.items() if b is not None})
    try:
        yield
    finally:
        for norm, buffers in zip(norms, held, strict=True):
            norm._buffers.update(buffers)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    del args, kwargs
    return CheckpointPolicy.MUST_SAVE if operation in _PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE

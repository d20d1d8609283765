"""Which kernels a device runs where torch chooses by device: traced on fake CPU tensors, counted as the device's.

On a GPU attention is fused (flash, or memory-efficient where flash cannot), dropout keeps a mask of one byte a number,
autocast keeps norms, softmax and losses in float32, optimizers work on all tensors at once, memory comes in pieces of
512 bytes, and some kernels need work space. The CPU's choices are other ones; without these rules a GPT-2 traced on the
CPU's kernels came out half as large again.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from shoal.profile.torch_private import cpu_kernels_replaced, without_autocast

_ATEN = torch.ops.aten
_FLASH_HEAD = 256
"""Flash attention takes heads of up to this width."""
_PIECE_BYTES = 512
_LARGE_BYTES = 10 << 20
_SEGMENT_BYTES = 2 << 20
"""Of torch's CUDA allocator (c10/cuda/CUDACachingAllocator: kMinBlockSize, kMinLargeAlloc, kRoundLarge)."""

_IN_FLOAT32 = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh",
    "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm",
    "group_norm", "cosine_similarity", "logsumexp", "dist", "renorm",
)  # fmt: skip
"""What CUDA's autocast runs in float32 and the CPU's does not (torch's documentation of autocast, "CUDA Ops that
autocast to float32")."""
_TO_FLOAT32 = ("softmax.int", "log_softmax.int", "cumsum", "cumprod", "sum", "sum.dim_IntList")
"""The same for operations that take the dtype of their result."""


def rounded(num_bytes: int) -> int:
    """Return what a GPU's allocator takes for a tensor of `num_bytes`.

    Pieces of 512 bytes. A large one has a segment of whole 2 MiB to itself, and the rest of it only goes to others
    where that is more than 1 MiB: 39.1 MiB take 40.
    """
    pieces_bytes = -(-num_bytes // _PIECE_BYTES) * _PIECE_BYTES
    if pieces_bytes < _LARGE_BYTES:
        return pieces_bytes
    segment_bytes = -(-pieces_bytes // _SEGMENT_BYTES) * _SEGMENT_BYTES
    return segment_bytes if segment_bytes - pieces_bytes <= _SEGMENT_BYTES // 2 else pieces_bytes


@contextlib.contextmanager
def gpu_kernels() -> Iterator[None]:
    """Trace, while it lasts, what a GPU would run."""
    chosen: dict[str, Any] = {"scaled_dot_product_attention": _attention, "dropout": _dropout}
    widened = {name: _in_float32(_overload(name)) for name in _IN_FLOAT32}
    widened |= {name: _to_float32(_overload(name)) for name in _TO_FLOAT32}
    with cpu_kernels_replaced(chosen, key="AutogradCPU"), cpu_kernels_replaced(widened, key="AutocastCPU"):
        yield


def as_on_gpu(optimizer: Any) -> Any:
    """Return `optimizer`, set to work on all tensors at once where it would choose so itself on a GPU."""
    for group in optimizer.param_groups:
        if "foreach" in group and group["foreach"] is None and not group.get("fused"):
            group["foreach"] = not isinstance(optimizer, torch.optim.Adafactor)
    return optimizer


def work_bytes(func: Any, args: Any, kwargs: Any) -> int:  # noqa: ARG001
    """Return the memory that a kernel takes for itself while it runs."""
    rule = _WORK.get(func.overloadpacket)
    return rule(args) if rule else 0


def no_work_bytes(func: Any, args: Any, kwargs: Any) -> int:  # noqa: ARG001
    """Return 0: the work space of the CPU's kernels is not known."""
    return 0


def _flash_backward_work(args: Any) -> int:
    query = args[1]
    batch, heads, length, width = query.shape
    length, width = -(-length // 128) * 128, -(-width // 32) * 32
    return int(4 * batch * heads * length * (width + 1))  # the gradient of the queries and a row sum, in float32


def _efficient_backward_work(args: Any) -> int:
    batch, heads, length, width = args[1].shape
    return int(4 * batch * heads * length * (1 + width * (args[1].dtype != torch.float32)))


_WORK = {
    _ATEN._scaled_dot_product_flash_attention_backward: _flash_backward_work,
    _ATEN._scaled_dot_product_efficient_attention_backward: _efficient_backward_work,
}


def _attention(  # noqa: PLR0917  torch calls it so
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if torch.is_autocast_enabled("cpu"):  # one of the operations that autocast makes smaller
        dtype = torch.get_autocast_dtype("cpu")
        query, key, value = (t.to(dtype) if t.dtype == torch.float32 else t for t in (query, key, value))
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    if attn_mask is None and is_half and query.shape[-1] <= _FLASH_HEAD:
        return _ATEN._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if enable_gqa:  # only flash takes fewer heads of keys than of queries; else torch writes out all scores
        return _ATEN._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=True
        )[0]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(attn_mask.logical_not(), -torch.inf)
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    needs_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    return _ATEN._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, needs_gradient, dropout_p, is_causal, scale=scale
    )[0]


def _dropout(tensor: Any, probability: float, train: bool) -> Any:
    if not train or probability == 0 or tensor.numel() == 0:
        return tensor
    return _ATEN.native_dropout(tensor, probability, train)[0]


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(_ATEN, packet), overload or "default")


def _in_float32(func: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            return func(*map(_widened, args), **{key: _widened(value) for key, value in kwargs.items()})

    return kernel


def _to_float32(func: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with without_autocast():
            if args[0].dtype in (torch.bfloat16, torch.float16) and kwargs.get("dtype") is None and len(args) < 3:
                kwargs["dtype"] = torch.float32
            return func(*args, **kwargs)

    return kernel


def _widened(value: Any) -> Any:
    is_half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if is_half else value

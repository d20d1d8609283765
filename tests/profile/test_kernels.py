"""The rules by which a GPU's kernels are traced on fake CPU tensors, held against what CUDA is documented to do."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shoal.profile import kernels
from shoal.profile.torch_private import FakeTensorMode, TorchDispatchMode


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results: dict[str, list[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if isinstance(first, torch.Tensor):
            self.results.setdefault(func.overloadpacket.__name__, []).append(first.dtype)
        return out


def run(work: Any, *, autocast: bool = False) -> dict[str, list[torch.dtype]]:
    with (
        kernels.gpu_kernels(),
        FakeTensorMode(),
        Seen() as seen,
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        work()
    results: dict[str, list[torch.dtype]] = seen.results
    return results


def tensors(count: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.empty(shape, dtype=dtype, requires_grad=True) for _ in range(count)]


@pytest.mark.parametrize(
    ("dtype", "masked", "expected"),
    [
        (torch.bfloat16, False, "_scaled_dot_product_flash_attention"),
        (torch.bfloat16, True, "_scaled_dot_product_efficient_attention"),
        (torch.float32, False, "_scaled_dot_product_efficient_attention"),
    ],
)
def test_attention_is_fused_as_on_a_gpu(dtype: torch.dtype, masked: bool, expected: str) -> None:
    def attend() -> None:
        mask = torch.ones(16, 16, dtype=torch.bool) if masked else None
        query, key, value = tensors(3, 2, 4, 16, 64, dtype=dtype)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        torch.autograd.grad(out.sum(), [query, key, value])

    seen = run(attend)
    assert expected in seen
    assert f"{expected}_backward" in seen


def test_attention_takes_what_autocast_makes_of_it() -> None:
    def attend() -> None:
        query, key, value = tensors(3, 2, 4, 16, 64)
        F.scaled_dot_product_attention(query, key, value)

    seen = run(attend, autocast=True)
    assert seen["_scaled_dot_product_flash_attention"] == [torch.bfloat16]


def test_fewer_heads_of_keys_in_float32_write_out_all_scores() -> None:
    def attend() -> None:
        query, key, value = torch.empty(2, 8, 16, 64), torch.empty(2, 2, 16, 64), torch.empty(2, 2, 16, 64)
        F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    assert "bmm" in run(attend)


def test_dropout_keeps_a_mask_of_one_byte() -> None:
    seen = run(lambda: F.dropout(tensors(1, 8, 8)[0], 0.1))
    assert "native_dropout" in seen
    assert run(lambda: F.dropout(tensors(1, 8, 8)[0], 0.1, training=False)) == {"empty": [torch.float32]}


def test_autocast_keeps_norms_and_losses_in_float32_and_products_in_bfloat16() -> None:
    def work() -> None:
        a, b = tensors(2, 8, 8)
        out = a @ b
        F.layer_norm(out, (8,))
        F.cross_entropy(out, torch.zeros(8, dtype=torch.long))

    seen = run(work, autocast=True)
    assert seen["mm"] == [torch.bfloat16]
    assert seen["native_layer_norm"] == [torch.float32]
    assert seen["_log_softmax"] == [torch.float32]


def test_the_rules_end_with_their_context() -> None:
    def layer_norm_dtype() -> torch.dtype:
        with torch.autocast("cpu", torch.bfloat16):
            return F.layer_norm(torch.ones(2, 8, dtype=torch.bfloat16), (8,)).dtype

    before = layer_norm_dtype()
    with kernels.gpu_kernels():
        assert layer_norm_dtype() == torch.float32
    assert layer_norm_dtype() == before == torch.bfloat16


def test_an_optimizer_works_on_all_tensors_at_once_unless_told_otherwise() -> None:
    parameters = tensors(2, 4)
    assert kernels.as_on_gpu(torch.optim.AdamW(parameters)).param_groups[0]["foreach"] is True
    assert kernels.as_on_gpu(torch.optim.AdamW(parameters, foreach=False)).param_groups[0]["foreach"] is False
    assert kernels.as_on_gpu(torch.optim.AdamW(parameters, fused=True)).param_groups[0]["foreach"] is None


@pytest.mark.parametrize(
    ("asked", "taken"),
    [
        (1, 512),
        (513, 1024),
        (5 << 20, 5 << 20),
        (39 * (1 << 20) + 4096, 40 << 20),  # the rest of its segment is too small to give away
        ((39 << 20) - 4096, (39 << 20) - 4096),  # the rest, more than 1 MiB, goes to others
    ],
)
def test_memory_comes_in_pieces_and_segments(asked: int, taken: int) -> None:
    assert kernels.rounded(asked) == taken

"""Dropout by sample, layer and step: any cut of the batch, any recomputation, any stage draws what one process draws.

Masks are the same to the bit. Where sums stand around them, 1e-6: float32 products of parts of a batch may be summed in
another order.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from shoal.parallel.exact.dropout import ExactDropout

SAMPLES = [11, 3, 8, 5, 20, 21, 2, 7]
CUTS = [[8], [3, 1, 4], [1] * 8, [7, 1]]
TOLERANCE = 1e-6

Function = Callable[[Tensor], Tensor]


def drop_path_by_bernoulli(x: Tensor) -> Tensor:
    return x * x.new_empty((x.shape[0], *[1] * (x.ndim - 1))).bernoulli_(0.7).div_(0.7)


def drop_path_by_rand(x: Tensor) -> Tensor:
    keep = 0.7 + torch.rand((x.shape[0], *[1] * (x.ndim - 1)), dtype=x.dtype, device=x.device)
    return x / 0.7 * keep.floor_()


class EncoderLayer(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.3, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layer(x) if self.batch_first else self.layer(x.transpose(0, 1)).transpose(0, 1)
        return output


def attention_with_weights() -> Function:
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
    return lambda x: attention(x, x, x, need_weights=True)[0]


def attend(x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.3, **options)


# Each takes [samples, ...]; the shape of a sample stands beside it.
FUNCTIONS: dict[str, tuple[Function, tuple[int, ...]]] = {
    "F.dropout": (lambda x: F.dropout(x, 0.3), (5, 6)),
    "F.dropout in place": (lambda x: F.dropout(x.clone(), 0.3, inplace=True), (5, 6)),
    "torch.dropout": (lambda x: torch.dropout(x, 0.3, True), (5,)),
    "nn.Dropout": (nn.Dropout(0.3), (5, 6)),
    "nn.Dropout1d": (nn.Dropout1d(0.3), (5, 6)),
    "nn.Dropout2d": (nn.Dropout2d(0.3), (5, 4, 3)),
    "nn.Dropout2d in place": (lambda x: F.dropout2d(x.clone(), 0.3, inplace=True), (5, 4, 3)),
    "nn.Dropout3d": (nn.Dropout3d(0.3), (5, 2, 2, 3)),
    "nn.AlphaDropout": (nn.AlphaDropout(0.3), (5, 6)),
    "nn.FeatureAlphaDropout": (nn.FeatureAlphaDropout(0.3), (5, 6, 2)),
    "attention": (attend, (2, 5, 4)),
    "causal attention": (lambda x: attend(x, is_causal=True), (2, 5, 4)),
    "nn.MultiheadAttention": (attention_with_weights(), (5, 6)),
    "nn.TransformerEncoderLayer": (EncoderLayer(batch_first=True), (5, 6)),
    "nn.TransformerEncoderLayer, sequence first": (EncoderLayer(batch_first=False), (24, 6)),
    "tokens of all samples in one dim": (lambda x: F.dropout(x.flatten(0, 1), 0.3).view_as(x), (5, 6)),
    "drop path by bernoulli": (drop_path_by_bernoulli, (5, 6)),
    "drop path by rand": (drop_path_by_rand, (5, 6)),
    "rand_like": (lambda x: x + torch.rand_like(x), (5,)),
    "randn_like": (lambda x: x + torch.randn_like(x), (5,)),
    "bernoulli": (lambda x: torch.bernoulli(x.sigmoid()), (5,)),
    "uniform_": (lambda x: x + torch.empty_like(x).uniform_(-1, to=3), (5,)),
    "normal_": (lambda x: x + torch.empty_like(x).normal_(std=2.0), (5,)),
    "gumbel_softmax": (F.gumbel_softmax, (5,)),
    "without a batch dim": (lambda x: x * torch.rand([]), (5,)),
    "of a parameter": (lambda x: x @ F.dropout(nn.Parameter(torch.ones(8, 5)), 0.3).T, (5,)),
}


def batch(*shape: int) -> Tensor:
    return torch.randn(len(SAMPLES), *shape, generator=torch.Generator().manual_seed(0))


def run_cut(function: Function, x: Tensor, cut: Sequence[int], *, step: int = 4) -> Tensor:
    """Return function(x) put together from micro-batches of the sizes `cut`."""
    dropout = ExactDropout({"layer": function} if isinstance(function, nn.Module) else {}, seed=1)
    outputs, start = [], 0
    with dropout:
        for size in cut:
            dropout.begin(step=step, samples=SAMPLES[start : start + size])
            outputs.append(function(x[start : start + size]))
            start += size
    dropout.remove()
    assert dropout.was_used
    assert not dropout.inexact
    return torch.cat(outputs)


@pytest.mark.parametrize("cut", CUTS[1:], ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_cut_of_the_batch_draws_the_same(name: str, cut: list[int]) -> None:
    function, shape = FUNCTIONS[name]
    x = batch(*shape)
    whole = run_cut(function, x, [8])
    torch.testing.assert_close(run_cut(function, x, cut), whole, rtol=TOLERANCE, atol=TOLERANCE)
    assert not torch.equal(whole, run_cut(function, x, [8], step=5))


def test_what_is_kept_is_scaled_and_its_gradient_too() -> None:
    x = batch(50, 60).requires_grad_()
    output = run_cut(lambda x: F.dropout(x, 0.25), x, [8])
    kept = output != 0
    assert kept.float().mean().item() == pytest.approx(0.75, abs=0.01)  # 24,000 elements: 3.6 standard deviations
    torch.testing.assert_close(output, x * kept / 0.75)
    output.sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, kept / 0.75)  # type: ignore[arg-type]


def test_features_are_dropped_whole() -> None:
    output = run_cut(nn.Dropout2d(0.5), torch.ones(8, 40, 3, 4), [8])
    assert set(output.sum((2, 3)).flatten().tolist()) == {0.0, 24.0}


@pytest.mark.parametrize("function", [F.alpha_dropout, F.feature_alpha_dropout])
def test_alpha_dropout_moves_elements_as_torch_does(function: Any) -> None:
    x = torch.full((8, 50, 6), 0.5)
    ours = run_cut(lambda x: function(x, 0.3, training=True), x, [8])
    torch.testing.assert_close(ours.unique(), function(x, 0.3, training=True).unique())  # type: ignore[no-untyped-call]


def test_rand_in_low_precision_stays_below_1() -> None:
    assert run_cut(lambda x: torch.rand_like(x.bfloat16()), batch(4000), [8]).max() < 1


def test_numbers_are_spread_as_torch_spreads_them() -> None:
    x = batch(4000)
    uniform = run_cut(torch.rand_like, x, [8])
    normal = run_cut(torch.randn_like, x, [8])
    exponential = run_cut(lambda x: torch.empty_like(x).exponential_(2.0), x, [8])
    assert 0 <= uniform.min() < 0.001 < 0.999 < uniform.max() < 1
    # 32,000 numbers: means are within 4 of their standard deviations.
    assert uniform.mean().item() == pytest.approx(0.5, abs=0.0065)
    assert [normal.mean().item(), normal.var().item()] == pytest.approx([0, 1], abs=0.032)
    assert exponential.mean().item() == pytest.approx(0.5, abs=0.012)


HIDDEN_ROW = torch.ones(8, 1, 5, 5, dtype=torch.bool).index_fill(2, torch.tensor([2]), False)
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.7},
    "numbers as mask": {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5)},
    "a row that sees nothing": {"attn_mask": HIDDEN_ROW},
    "grouped heads": {"enable_gqa": True},
}


@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_that_of_torch_with_our_mask(case: str) -> None:
    options = ATTENTION[case]
    query, key, value = (batch(4, 5, 6).roll(shift, 0).requires_grad_() for shift in range(3))
    few = 2 if "enable_gqa" in options else 4
    groups = key[:, :few], value[:, :few]
    ours = run_cut(lambda q: F.scaled_dot_product_attention(q, *groups, dropout_p=0.3, **options), query, [8])
    mask = run_cut(lambda x: F.dropout(x, 0.3), torch.ones(8, 4, 5, 5), [8])
    weights = F.scaled_dot_product_attention(query, key[:, :few], torch.eye(5).expand(8, few, 5, 5), **options)
    expected = (weights * mask) @ value[:, :few].repeat_interleave(4 // few, 1)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    ours.square().sum().backward()  # type: ignore[no-untyped-call]
    assert all(bool(tensor.grad.isfinite().all()) for tensor in (query, key, value))  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_mask_does_not_depend_on_the_precision(dtype: torch.dtype) -> None:
    expected = run_cut(lambda x: F.dropout(x, 0.3), torch.ones(8, 30), [8]) != 0
    assert torch.equal(run_cut(lambda x: F.dropout(x.to(dtype), 0.3), torch.ones(8, 30), [8]) != 0, expected)

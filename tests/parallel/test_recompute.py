"""Recomputation changes what is kept, and nothing else."""

import copy

import pytest
import torch
from torch import nn

from shoal.parallel.recompute import apply_recompute


def block() -> nn.Module:
    """Return a block with a batch norm, and dropout of nothing."""
    return nn.Sequential(nn.Conv1d(3, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Conv1d(4, 2, 1))


@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_gradients_and_running_statistics_are_those_of_one_forward(kind: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(block(), nn.Conv1d(2, 3, 1), block())
    kept = copy.deepcopy(plain)
    apply_recompute([kept[0], kept[2]], kind)
    for seed in range(2):
        x = torch.randn(5, 3, 7, generator=torch.Generator().manual_seed(seed))
        for model in (plain, kept):
            model(x).square().mean().backward()
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(kept.get_parameter(name).grad, parameter.grad)
    assert plain.get_buffer("0.1.num_batches_tracked") == 2
    for name, buffer in plain.named_buffers():
        torch.testing.assert_close(kept.get_buffer(name), buffer)


def test_only_the_input_of_a_block_is_kept() -> None:
    model = block()
    apply_recompute([model], "full")
    kept: list[torch.Tensor] = []
    x = torch.randn(5, 3, 7, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        model(x)
    assert all(tensor is x for tensor in kept)

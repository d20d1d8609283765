"""Tensor parallelism against the plain model: losses, every gradient, every parameter after two steps."""

import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from shoal.comm.rank import Rank
from shoal.parallel.exact.dropout import ExactDropout
from shoal.parallel.tensor.divide import apply_tensor, find_regions
from shoal.parallel.tensor.plan import find_tensor_plan
from shoal.profile.layers import find_layers
from tests.parallel.tensor.models import CASES
from tests.parallel.tensor.training import TOLERANCE, Trained, built, divided, largest_difference, mesh_of, trained
from tests.support.ranks import RankPool


def divided_like_plain(rank: Rank, *, case: str, sequences: tuple[bool, ...] = (False, True)) -> tuple[float, str]:
    """Return the largest difference from the plain model, with whole tokens or divided ones, and where it is."""
    worst = (0.0, "")
    with mesh_of(rank, tensor=rank.workers) as mesh:
        reference = trained(built(case), CASES[case].loss)
        for sequence in sequences:
            model, division = divided(case, mesh, sequence=sequence)
            assert pickle.loads(pickle.dumps(division)) == division
            difference, where = largest_difference(trained(model, CASES[case].loss, division), reference)
            worst = max(worst, (difference, f"{where}, {sequence=}"))
    return worst


@pytest.mark.parametrize("case", CASES)
def test_a_divided_model_trains_as_the_plain_one(ranks: RankPool, case: str) -> None:
    for difference, where in ranks.run(divided_like_plain, workers=2, case=case):
        assert difference < TOLERANCE, where


@pytest.mark.parametrize("case", ["gpt", "gpt2", "bert", "vit"])
def test_a_model_divided_by_four_trains_as_the_plain_one(ranks: RankPool, case: str) -> None:
    for difference, where in ranks.run(divided_like_plain, workers=4, case=case, sequences=(True,)):
        assert difference < TOLERANCE, where


def sharded_like_plain(rank: Rank, *, case: str, variants: list[tuple[bool, bool]]) -> tuple[float, str]:
    """Compare tensor=2 under FSDP2 over 2 replicas, each with a batch of its own, with one process that has both.

    `variants` say whether tokens are divided, and whether blocks are recomputed.
    """
    loss = CASES[case].loss
    worst = (0.0, "")
    with mesh_of(rank, shard=2, tensor=2) as mesh:
        reference = trained(built(case), lambda model, step: (loss(model, 2 * step) + loss(model, 2 * step + 1)) / 2)
        for sequence, recompute in variants:
            difference, where = largest_difference(sharded(case, mesh, sequence, recompute), reference)
            worst = max(worst, (difference, f"{where}, {sequence=}, {recompute=}"))
    return worst


def sharded(case: str, mesh: DeviceMesh, sequence: bool, recompute: bool) -> Trained:
    loss, index = CASES[case].loss, mesh["shard"].get_local_rank()
    model, division = divided(case, mesh["tensor"], sequence=sequence)
    for name in find_regions(model, find_tensor_plan(built(case), tensor=2)):
        if recompute:
            recomputed(model.get_submodule(name))
        fully_shard(model.get_submodule(name), mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    losses, gradients, parameters = trained(model, lambda model, step: loss(model, 2 * step + index) / 2, division)
    total = torch.tensor(losses)
    torch.distributed.all_reduce(total, group=mesh["shard"].get_group())
    return total.tolist(), gradients, parameters


def recomputed(module: nn.Module) -> None:
    module.__dict__["forward"] = partial(checkpoint, module.forward, use_reentrant=False)


@pytest.mark.parametrize("case", ["gpt", "gpt2", "llama", "vit", "encoder", "grouped split"])
def test_a_divided_model_is_sharded_by_fsdp(ranks: RankPool, case: str) -> None:
    mixed = [(True, False), (False, True)] if case == "gpt" else []  # for the others, both or none
    variants = [(False, False), (True, True), *mixed]
    for difference, where in ranks.run(sharded_like_plain, workers=4, case=case, variants=variants):
        assert difference < TOLERANCE, where


def dropping_like_plain(rank: Rank, *, sequence: bool) -> tuple[float, str]:
    """Compare with dropout everywhere, also of attention weights, under the masks of ExactDropout."""

    def build() -> nn.Module:
        model = built("gpt2")
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.2
        return model

    def loss(dropout: ExactDropout, model: nn.Module, step: int) -> Tensor:
        dropout.begin(step=step, samples=range(4))
        with dropout:
            return CASES["gpt2"].loss(model, step)

    with mesh_of(rank, tensor=rank.workers) as mesh:
        plain, model = build(), build()
        division = apply_tensor(model, mesh, find_tensor_plan(model, tensor=2), sequence=sequence)
        modes = [ExactDropout(find_layers(m)[0], seed=1) for m in (model, plain)]
        ours = trained(model, partial(loss, modes[0]), division)
        reference = trained(plain, partial(loss, modes[1]))
        assert abs(trained(built("gpt2"), CASES["gpt2"].loss)[0][0] - reference[0][0]) > 1e-3  # something is dropped
        return largest_difference(ours, reference)


@pytest.mark.parametrize("sequence", [False, True], ids=["whole tokens", "divided tokens"])
def test_a_divided_model_drops_what_the_plain_one_drops(ranks: RankPool, sequence: bool) -> None:
    for difference, where in ranks.run(dropping_like_plain, workers=2, sequence=sequence):
        assert difference < TOLERANCE, where


def evaluated_like_plain(rank: Rank, *, case: str) -> float:
    """Compare a loss without gradients, in evaluation mode and outside of tensor_context."""
    with mesh_of(rank, tensor=rank.workers) as mesh, torch.no_grad():
        reference = CASES[case].loss(built(case).eval(), 0)
        ours = CASES[case].loss(divided(case, mesh)[0].eval(), 0)
        assert not isinstance(ours, DTensor)
        return abs(ours.item() / reference.item() - 1)


@pytest.mark.parametrize("case", ["gpt", "gpt2", "llama padded", "encoder"])
def test_a_divided_model_is_evaluated_as_the_plain_one(ranks: RankPool, case: str) -> None:
    assert max(ranks.run(evaluated_like_plain, workers=2, case=case)) < TOLERANCE

"""A LightningModule under plans, held against Lightning alone in one process."""

from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.sync import Sync
from tests.lightning.modules import BATCH, NUM_SAMPLES, Numbers, fit, network
from tests.support.ranks import RankPool

TOLERANCE = 2e-5
"""Relative: sums over workers are added up in another order, and AdamW passes a rounding error on."""

PLANS: dict[str, Plan | str] = {
    "one worker": "auto",
    "two copies": Plan(mesh=Mesh(replicate=2)),
    "two copies by DDP": Plan(mesh=Mesh(replicate=2), sync=Sync(way="engine")),
    "unequal shares": Plan(mesh=Mesh(replicate=2), batch=Batch(shares=(0.7, 0.3))),
    "ZeRO-1": Plan(mesh=Mesh(shard=2), zero=1),
    "ZeRO-2": Plan(mesh=Mesh(shard=2), zero=2),
    "ZeRO-3": Plan(mesh=Mesh(shard=2), zero=3),
    "tensor": Plan(mesh=Mesh(tensor=2)),
    "ZeRO-3, recomputed": Plan(mesh=Mesh(shard=2), zero=3, recompute="full"),
}


def workers_of(plan: Plan | str) -> int:
    return plan.workers if isinstance(plan, Plan) else 1


@pytest.fixture(scope="module")
def alone(ranks: RankPool) -> dict[str, Any]:
    """Lightning alone, one process."""
    (result,) = ranks.run(fit, workers=1, plan=None)
    return result  # type: ignore[no-any-return]


def assert_equal(results: list[dict[str, Any]], alone: dict[str, Any], *, atol: float = 1e-6) -> None:
    for result in results:
        assert len(result["losses"]) == len(alone["losses"]) > 0
        torch.testing.assert_close(result["losses"], alone["losses"], rtol=TOLERANCE, atol=1e-7)
        assert result["val_loss"] == pytest.approx(alone["val_loss"], rel=TOLERANCE)
        assert result["validated"] == pytest.approx(alone["val_loss"], rel=TOLERANCE)
    state = results[0]["state"]
    assert state.keys() == alone["state"].keys()
    for name, value in alone["state"].items():
        torch.testing.assert_close(state[name], value, rtol=TOLERANCE, atol=atol)


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_what_lightning_alone_trains(ranks: RankPool, alone: dict[str, Any], name: str) -> None:
    plan = PLANS[name]
    results = ranks.run(fit, workers=workers_of(plan), plan=plan)
    assert_equal(results, alone)
    parts = 1 if name == "tensor" else len(results)  # workers of the tensor axis have the same samples
    assert sorted(chain(*(result["predicted"] for result in results[:parts]))) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("name", ["two copies", "ZeRO-2", "ZeRO-3"])
def test_accumulated_batches_are_one_step(ranks: RankPool, name: str) -> None:
    (alone,) = ranks.run(fit, workers=1, plan=None, accumulate_grad_batches=2, max_epochs=1)
    assert_equal(ranks.run(fit, workers=2, plan=PLANS[name], accumulate_grad_batches=2, max_epochs=1), alone)


@pytest.mark.parametrize("name", ["two copies", "ZeRO-3"])
def test_batch_norm_and_dropout_do_not_know_of_the_workers(ranks: RankPool, name: str) -> None:
    (one,) = ranks.run(fit, workers=1, plan="auto", hard=True)
    # A weight whose gradient is next to nothing moves by its sign: 4e-6 of 0.3 were seen.
    assert_equal(ranks.run(fit, workers=2, plan=PLANS[name], hard=True), one, atol=5e-5)


def test_bfloat16_of_the_trainer_or_of_the_plan_is_the_same_everywhere(ranks: RankPool) -> None:
    (one,) = ranks.run(fit, workers=1, plan=Plan(precision="bf16"), max_epochs=1)
    two, _ = ranks.run(fit, workers=2, plan="auto", precision="bf16-mixed", max_epochs=1)
    (alone,) = ranks.run(fit, workers=1, plan=None, precision="bf16-mixed", max_epochs=1)
    for result in (one, two):
        torch.testing.assert_close(result["losses"], alone["losses"], rtol=2e-2, atol=0)  # bfloat16 has 8 bits


def test_shuffled_batches_are_the_same_samples_whatever_the_workers(ranks: RankPool) -> None:
    shuffled: dict[str, Any] = {"plan": "auto", "loading": {"shuffle": True}}
    (one,) = ranks.run(fit, workers=1, **shuffled)
    two = ranks.run(fit, workers=2, **shuffled)
    together = [[*first, *second] for first, second in zip(two[0]["seen"], two[1]["seen"], strict=True)]
    assert together == one["seen"]
    per_epoch = -(-NUM_SAMPLES // BATCH)
    epochs = [list(chain(*one["seen"][first : first + per_epoch])) for first in (0, per_epoch)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(NUM_SAMPLES))
    assert epochs[0] != epochs[1] != list(range(NUM_SAMPLES))


def test_a_sampler_of_ones_own_is_drawn_alike_by_all_workers(ranks: RankPool) -> None:
    (one,) = ranks.run(fit, workers=1, plan="auto", load=weighted, max_epochs=1)
    two = ranks.run(fit, workers=2, plan="auto", load=weighted, max_epochs=1)
    assert [[*a, *b] for a, b in zip(two[0]["seen"], two[1]["seen"], strict=True)] == one["seen"]


def test_a_worker_without_a_sample_of_the_last_batch_counts_nothing(ranks: RankPool) -> None:
    (one,) = ranks.run(fit, workers=1, plan=None, loading={"batch_size": 11})  # the last batch has one sample
    for plan in (PLANS["two copies"], PLANS["ZeRO-3"]):
        assert_equal(ranks.run(fit, workers=2, plan=plan, loading={"batch_size": 11}), one)


def test_the_loss_is_a_mean_over_what_the_weight_counts(ranks: RankPool) -> None:
    first, second = ranks.run(fit, workers=2, plan="auto", strategy={"weight": first_half}, max_epochs=1)
    data = Numbers()
    counted = torch.nn.functional.mse_loss(network()(data.x[: BATCH // 2]) * 1.5, data.y[: BATCH // 2])
    assert first["losses"][0] == second["losses"][0] == pytest.approx(counted.item(), rel=1e-6)


def weighted() -> Any:
    return DataLoader(Numbers(), batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES))


def first_half(batch: Any) -> float:
    return float((batch[2] % BATCH < BATCH // 2).sum())

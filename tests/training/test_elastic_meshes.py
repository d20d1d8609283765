"""Runs that lose a worker which alone held its part of the model: from its copy, with a replacement, or with fewer."""

from pathlib import Path
from typing import Any

import pytest

from shoal.fault.inject import fail_at
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Batch, Mesh, Plan
from tests.support.elastic import TOLERANCE, assert_nothing_left, check, train, undisturbed_run
from tests.support.training import Trace


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"))


@pytest.mark.parametrize("mesh", [Mesh(shard=3), Mesh(replicate=2, tensor=2)], ids=["zero", "tensor"])
def test_what_only_the_lost_worker_held_is_still_there(mesh: Mesh, tmp_path: Path, undisturbed: Trace) -> None:
    plan = Plan(mesh=mesh, zero=3 if mesh.shard > 1 else 0, timeout_s=60, on_loss=OnLoss(snapshot="1"))
    awaited = mesh.workers if mesh.shard > 1 else 0
    ended = train(tmp_path, plan, [fail_at(1, 20, point="all-reduce")], awaited=awaited)
    check(ended, undisturbed, faults=1, sharers=mesh.tensor)
    assert ended.of_kind("loss")[0]["lost_steps"] <= 1


def of_one_model(mesh: Mesh, **on_loss: Any) -> Plan:
    """A plan whose workers hold one model together, and none of it twice."""
    settings = OnLoss(snapshot="1", wait_s=1e6, **on_loss)
    return Plan(mesh=mesh, batch=Batch(micro_batch=3), timeout_s=60, on_loss=settings)


@pytest.mark.parametrize("mesh", [Mesh(pipeline=2), Mesh(tensor=2)], ids=["pipeline", "tensor"])
def test_who_cannot_go_on_without_the_lost_one_waits_for_its_replacement(
    mesh: Mesh, tmp_path: Path, undisturbed: Trace
) -> None:
    ended = train(tmp_path, of_one_model(mesh), [fail_at(1, 20, point="backward")])
    check(ended, undisturbed, faults=1, sharers=2)
    (loss,) = ended.of_kind("loss")
    assert (loss["workers"], loss["lost_steps"] <= 1) == (2, True)
    assert [event["joined"] for event in ended.of_kind("joined")] == [[1]]


def test_where_none_comes_they_end_with_a_sentence(tmp_path: Path) -> None:
    ended = train(tmp_path, of_one_model(Mesh(pipeline=2), restarts=0), [fail_at(1, 20)])
    assert ended.error.startswith("WorkerFailed: worker 1 is lost, and is started no more (on_loss.restarts); the 1")
    assert "left does not hold a whole model" in ended.error
    assert_nothing_left(ended)


@pytest.mark.parametrize("mesh", [Mesh(pipeline=2), Mesh(tensor=2)], ids=["pipeline", "tensor"])
def test_or_they_go_on_with_fewer_if_the_plan_says_so(mesh: Mesh, tmp_path: Path, undisturbed: Trace) -> None:
    plan = of_one_model(mesh, restarts=0, replan=True)
    ended = train(tmp_path, plan, [fail_at(0, 20)])
    assert ended.error == "", ended.lines
    (loss,) = ended.of_kind("loss")
    assert (loss["dead"], loss["workers"], loss["lost_steps"] <= 1) == ([0], 1, True)
    losses = ended.losses()
    assert sorted(losses) == list(range(1, len(undisturbed.losses) + 1))
    for step, found in losses.items():
        assert list(found) == pytest.approx([undisturbed.losses[step - 1]] * len(found), rel=TOLERANCE), f"step {step}"
    assert_nothing_left(ended)

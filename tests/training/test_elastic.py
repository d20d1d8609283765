"""Runs whose workers are killed: they go on, and the numbers are those of a run that lost nobody."""

from dataclasses import replace
from pathlib import Path

import pytest

from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.inject import fail_at
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Checkpoints
from shoal.spec.sync import Sync
from tests.support.elastic import Ended, check, replicas, train, undisturbed_run
from tests.support.training import Trace


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return undisturbed_run(tmp_path_factory.mktemp("undisturbed"))


def test_workers_killed_in_steps_are_replaced_and_the_others_go_on(tmp_path: Path, undisturbed: Trace) -> None:
    faults = [fail_at(1, 10, point="all-reduce"), fail_at(0, 60, point="backward"), fail_at(2, 60)]
    ended = train(tmp_path, replicas(4), faults, awaited=4)
    check(ended, undisturbed, faults=3)
    losses = ended.of_kind("loss")
    assert losses[0]["dead"] == [1]
    assert losses[0]["workers"] == 3
    assert {number for event in losses for number in event["dead"]} == {0, 1, 2}
    assert all(event["lost_steps"] == 0 for event in losses), "replicas hold every step"
    assert {number for event in ended.of_kind("joined") for number in event["joined"]} >= {1}
    assert any("worker 1" in line and "was killed by SIGKILL" in line for line in ended.lines)


def test_a_checkpoint_in_which_a_worker_dies_is_given_up_and_later_ones_are_written(
    tmp_path: Path, undisturbed: Trace
) -> None:
    plan = replicas(3, checkpoint=Checkpoints(every_steps=10, keep=50))
    points = ("checkpoint: committing", "checkpoint: writing", "checkpoint: copying")
    faults = [fail_at(worker, 10 * (worker + 1), point=point) for worker, point in enumerate(points)]
    ended = train(tmp_path, replace(plan, on_loss=OnLoss(restarts=1)), faults)
    check(ended, undisturbed, faults=3)
    there = {step_of(path) for path in committed(ended.folder.checkpoints)}
    assert {40, 100, 150} <= there


def test_a_worker_killed_at_the_start_and_one_in_the_recovery(tmp_path: Path, undisturbed: Trace) -> None:
    faults = [fail_at(2, 0, point="start"), fail_at(1, 20), fail_at(0, 20, point="recovery")]
    check(train(tmp_path, replicas(3), faults), undisturbed, faults=3)


def test_when_all_are_dead_they_go_on_from_memory(tmp_path: Path, undisturbed: Trace) -> None:
    plan = replicas(2, on_loss=OnLoss(snapshot="1"))
    ended = train(tmp_path, plan, [fail_at(0, 140), fail_at(1, 140)])
    check(ended, undisturbed, faults=2)
    assert first_after_the_last_start(ended) in (139, 140), "one step is lost at most"


def test_when_all_are_dead_and_nothing_is_in_memory_they_go_on_from_a_checkpoint(
    tmp_path: Path, undisturbed: Trace
) -> None:
    plan = replicas(2, checkpoint=Checkpoints(every_steps=10), on_loss=OnLoss(snapshot="never"))
    ended = train(tmp_path, plan, [fail_at(0, 140), fail_at(1, 140)])
    check(ended, undisturbed, faults=2)
    assert first_after_the_last_start(ended) in range(11, 141, 10)


def first_after_the_last_start(ended: Ended) -> int:
    """Return the first step of the last generation."""
    began = ended.of_kind("start")[-1]["time"]
    return min(int(event["step"]) for event in ended.of_kind("step") if event["time"] > began)


def test_the_last_worker_trains_to_the_end_if_none_is_replaced(tmp_path: Path, undisturbed: Trace) -> None:
    plan = replicas(2, on_loss=OnLoss(restarts=0))
    ended = train(tmp_path, plan, [fail_at(0, 50, point="all-reduce")])
    check(ended, undisturbed, faults=1)
    assert any("is not again" in line for line in ended.lines)


def test_over_gloo_as_well(tmp_path: Path, undisturbed: Trace) -> None:
    plan = replicas(3, sync=Sync(way="engine"))
    faults = [fail_at(2, 10, point="all-reduce"), fail_at(0, 40)]
    check(train(tmp_path, plan, faults), undisturbed, faults=2)


def test_a_run_that_is_to_stop_at_a_loss_stops(tmp_path: Path) -> None:
    plan = replicas(2, on_loss=OnLoss(go_on=False))
    ended = train(tmp_path, plan, [fail_at(1, 5)])
    assert ended.error.startswith("WorkerFailed: worker 1")
    assert "was killed by SIGKILL after step 4" in ended.error


def test_a_worker_that_keeps_dying_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    plan = replicas(1, on_loss=OnLoss(restarts=1))
    faults = [fail_at(0, 5), fail_at(0, 6)]
    ended = train(tmp_path, plan, faults)
    assert len(ended.struck) == 2
    assert "was killed by SIGKILL" in ended.error

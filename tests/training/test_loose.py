"""Runs whose workers may be apart: they lose some, let others in, are stopped, and stop together."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.errors import ConfigError, Stopped
from shoal.core.events import EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.inject import fail_at, stop_at
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.loop import train_all
from shoal.training.opening import open_run
from tests.support.elastic import Ended, assert_nothing_left, replicas, train
from tests.support.jobs import linear
from tests.support.ranks import RankPool

MODES = {
    "local": Sync(mode="local", local_steps=8, outer="nesterov"),
    "deadline": Sync(mode="deadline"),
    "server": Sync(mode="server", servers=2),
    "asynchronous": Sync(mode="server", servers=2, asynchronous=True),
}


@pytest.fixture(params=list(MODES))
def sync(request: pytest.FixtureRequest) -> Sync:
    return MODES[request.param]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The loss over the evaluation's samples after 150 steps: of one process, and of workers that meet rarely."""
    plans = {"one process": replicas(1), "local": replicas(2, sync=MODES["local"])}
    ended = {name: train(tmp_path_factory.mktemp("undisturbed"), plan, []) for name, plan in plans.items()}
    return {name: float(run.of_kind("eval")[-1]["metrics"]["loss"]) for name, run in ended.items()}


def check(ended: Ended, sync: Sync, undisturbed: dict[str, float]) -> None:
    """Assert that the run has come to its end, every step was done by somebody, and the loss is a trained one."""
    assert ended.error == "", ended.lines
    assert len(ended.struck) == 1, "the fault has struck"
    evals = ended.of_kind("eval")
    assert [event["step"] for event in evals] == [50, 100, 150]
    # Servers that wait for all may do a step or two without the dead worker's samples before it is replaced, and are
    # exact else. The others train otherwise, and get about as far.
    near = 0.05 if sync.mode == "server" and not sync.asynchronous else 0.3
    as_far_as = undisturbed.get(sync.mode, undisturbed["one process"])
    assert evals[-1]["metrics"]["loss"] == pytest.approx(as_far_as, rel=near)
    assert {event["step"] for event in ended.of_kind("step")} == set(range(1, 151)), "every step was done"
    assert_nothing_left(ended)


def test_a_killed_worker_is_replaced_and_the_others_go_on(
    tmp_path: Path, sync: Sync, undisturbed: dict[str, float]
) -> None:
    ended = train(tmp_path, replicas(2, sync=sync), [fail_at(1, 61)], awaited=2)
    check(ended, sync, undisturbed)
    assert [event["dead"] for event in ended.of_kind("loss")] == [[1]]
    assert {number for event in ended.of_kind("joined") for number in event["joined"]} == {1}
    done = [event["step"] for event in ended.events[0] if event["kind"] == "step"]
    again = {step for step in done if done.count(step) > 1}
    if sync.mode == "local":
        assert again, "from the last meeting, after step 56"
        assert min(again) == 57
    elif sync.mode == "server" and not sync.asynchronous:  # which gives a worker several parts of a step
        assert not again or min(again) > 50, "from the last boundary"


def test_nobody_waits_long_for_a_worker_that_is_stopped_for_a_while(
    tmp_path: Path, undisturbed: dict[str, float]
) -> None:
    ended = train(tmp_path, replicas(2, sync=MODES["deadline"]), [stop_at(1, 60, seconds=1.0)])
    check(ended, MODES["deadline"], undisturbed)
    skipped = {event["step"] for event in ended.events[0] if event["kind"] == "step"} - {
        event["step"] for event in ended.events[1] if event["kind"] == "step"
    }
    assert skipped, "the stopped worker has left steps out"


def asked_to_stop(rank: Rank, *, folder: Path) -> tuple[int, str]:
    """Be one worker, of whom the second is asked to stop in its step 17. Runs in the pool."""
    log = EventLog(RunFolder(folder).events_of(rank.index))
    try:
        with open_run(
            linear(steps=5000), RunFolder(folder), rank=rank, store=connect(rank, timeout_s=60), log=log
        ) as run:

            def on_step() -> None:
                time.sleep(0.001 * (1 + rank.index))  # they are not equally fast
                if rank.index == 1 and run.step_count >= 17 and not asked:
                    asked.append(run.step_count)
                    os.kill(os.getpid(), signal.SIGTERM)

            asked: list[int] = []
            train_all(run, on_step=on_step)
            return run.step_count, ""
    except Stopped as stopped:
        return -1, str(stopped)
    finally:
        log.close()


def test_asked_to_stop_all_stop_after_the_same_step_with_a_checkpoint(
    ranks: RankPool, tmp_path: Path, sync: Sync
) -> None:
    plan = Plan(mesh=Mesh(replicate=3), sync=sync, timeout_s=60)
    run = RunFolder.create(tmp_path, None, stem="run")
    write_toml(run.plan_toml, plan)
    said = {message for _, message in ranks.run(asked_to_stop, workers=3, folder=run.path)}
    assert len(said) == 1, said
    steps = [step_of(path) for path in committed(run.checkpoints)]
    assert len(steps) == 1
    assert f"stopped by SIGTERM to worker 1 after step {steps[0]}, with a checkpoint." in said.pop()


def own_loop(rank: Rank, *, folder: Path) -> str:
    """Be one worker with a loop of its own, which evaluates where workers are apart. Runs in the pool."""
    log = EventLog(RunFolder(folder).events_of(rank.index))
    job = linear(steps=8, eval_data=linear().data, eval_every_steps=4)
    try:
        with open_run(job, RunFolder(folder), rank=rank, store=connect(rank, timeout_s=60), log=log) as run:
            said = ""
            for batch in run.batches():
                run.step(batch)
                if run.step_count == 3:
                    with pytest.raises(ConfigError) as refused:
                        run.evaluate()
                    said = str(refused.value)
                if run.step_count % 4 == 0:
                    assert torch.isfinite(torch.tensor(run.evaluate()["loss"]))
            return said
    finally:
        log.close()


def test_an_evaluation_while_workers_are_apart_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(replicate=2), sync=Sync(mode="local", local_steps=50))
    run = RunFolder.create(tmp_path, None, stem="run")
    write_toml(run.plan_toml, plan)
    said = ranks.run(own_loop, workers=2, folder=run.path)
    assert "run.evaluate() after step 3, with sync.mode='local': workers are apart then." in said[0]
    evals = [event["step"] for event in EventReader(run.events_of(0)).poll() if event["kind"] == "eval"]
    assert evals == [4, 8]

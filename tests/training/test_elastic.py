"""Runs whose workers are killed: they go on, and the numbers are those of a run that lost nobody."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.shm import kept
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.inject import Fault, environment, fail_at, struck
from shoal.launch.cause import find_cause
from shoal.launch.local import Watch, launch_local
from shoal.launch.starting import workers_of
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Checkpoints, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.host import this_host
from shoal.training.jobfile import load_job
from shoal.training.prepare import write_run
from tests.support.training import Trace, reference

TOLERANCE = 1e-5
"""Of float32: sums over other numbers of workers are rounded otherwise."""

JOB = """
import os, time
import torch
import torch.distributed as dist
from torch import nn
import shoal
from shoal.comm.calls import CALLS

x = torch.randn(50, 6, generator=torch.Generator().manual_seed(7))
AWAITED = int(os.environ.get("AWAITED", "0"))


def loss(output, batch):
    # From step 30 on steps are slow until replacements have joined, so that they come in time.
    if CALLS.step > 30 and AWAITED and (not dist.is_initialized() or dist.get_world_size() < AWAITED):
        time.sleep(0.4)
    return ((output[:, 0] - batch[1]) ** 2).mean()


job = shoal.Job(
    model=lambda: nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1)),
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    schedule=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.7),
    data=torch.utils.data.TensorDataset(x, x.sum(1).sin()),
    eval_data=torch.utils.data.TensorDataset(x[:10], x[:10].sum(1).sin()),
    eval_every_steps=50,
    batch_size=12,
    steps=150,
)
"""


@dataclass
class Ended:
    """A run that has ended."""

    folder: RunFolder
    error: str
    lines: list[str]
    struck: list[dict[str, Any]]
    memory: list[Path]
    """Where its snapshots were."""
    events: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        found = [event for log in self.events.values() for event in log if event["kind"] == kind]
        return sorted(found, key=lambda event: event["time"])

    def losses(self) -> dict[int, set[float]]:
        """Return the losses that workers have logged for each step; those of a step that was repeated, too."""
        found: dict[int, set[float]] = {}
        for event in self.of_kind("step"):
            found.setdefault(event["step"], set()).add(event["loss"])
        return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    job = load_job(job_file(tmp_path_factory.mktemp("undisturbed")))
    return reference(job, job.total_steps)


def job_file(folder: Path) -> Path:
    path = folder / "job.py"
    path.write_text(JOB)
    return path


def train(folder: Path, plan: Plan, faults: list[Fault], *, awaited: int = 0) -> Ended:
    """Train the job by processes of which some are killed."""
    file = job_file(folder)
    job = load_job(file)
    run = RunFolder.create(folder, "run", stem="run")
    write_run(run, job, plan, this_host(), file=file)
    strikes = folder / "strikes"
    strikes.mkdir()
    lines: list[str] = []
    watch = Watch(on_line=lambda rank, line: lines.append(f"[{rank}] {line}"), on_note=lines.append)
    variables = {**environment(faults, folder=strikes), "AWAITED": str(awaited)}
    memory: list[Path] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kept, "remove_room", noting(memory))
        for name, value in variables.items():
            patch.setenv(name, value)
        workers = launch_local(
            workers_of(run.path), workers=plan.workers, timeout_s=60, watch=watch, on_loss=plan.on_loss
        )
    cause = find_cause(run, workers)
    events = {number: EventReader(run.events_of(number)).poll() for number in range(plan.workers)}
    return Ended(
        run, "" if cause is None else f"{type(cause).__name__}: {cause}", lines, struck(strikes), memory, events
    )


def noting(memory: list[Path]) -> Callable[[str], None]:
    """Return a `remove_room` that notes which."""
    remove_room = kept.remove_room

    def noted(token: str) -> None:
        memory.append(kept.SHARED / f"shoal-{os.geteuid()}-{token}")
        assert memory[0].exists()
        remove_room(token)

    return noted


def check(ended: Ended, undisturbed: Trace, *, faults: int, sharers: int = 1) -> None:
    """Assert that the run has come to its end as if nothing had happened. Each sample has `sharers` workers."""
    assert ended.error == "", ended.lines
    assert len(ended.struck) == faults, "all faults have struck"
    losses = ended.losses()
    assert sorted(losses) == list(range(1, len(undisturbed.losses) + 1)), "every step was done"
    for step, found in losses.items():
        for loss in found:
            assert loss == pytest.approx(undisturbed.losses[step - 1], rel=TOLERANCE), f"step {step}"
    assert_samples_once(ended, undisturbed, sharers)
    assert [event["step"] for event in ended.of_kind("eval")] == [50, 100, 150]
    assert_nothing_left(ended)


def assert_samples_once(ended: Ended, undisturbed: Trace, sharers: int) -> None:
    """Each step's parts make up its batch, where all that took part live to tell of it."""
    changes = [*ended.of_kind("loss"), *ended.of_kind("joined")]
    hit = {event["step"] + ahead for event in changes for ahead in (0, 1)}
    whole = [step for step in range(1, len(undisturbed.losses) + 1) if step not in hit]
    # When a worker died, and from which step the others have gone on: what was done of later steps counts no more.
    returns = [(event["time"] - event["recovery_s"], event["step"]) for event in changes]
    counted = dict.fromkeys(whole, 0)
    for event in ended.of_kind("step"):
        is_repeated = any(event["time"] < when_s and event["step"] > step for when_s, step in returns)
        if event["step"] in counted and not is_repeated:
            counted[event["step"]] += event["samples"]
    assert counted == {step: sharers * len(undisturbed.samples[step - 1]) for step in whole}


def assert_nothing_left(ended: Ended) -> None:
    """No process, no shared memory, no half-written checkpoint."""
    pids = {event["pid"] for event in ended.of_kind("start")}
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert ended.memory
    assert not [path for path in ended.memory if path.exists()]
    folders = list(ended.folder.checkpoints.glob("step-*")) if ended.folder.checkpoints.exists() else []
    assert sorted(folders) == committed(ended.folder.checkpoints)


def replicas(workers: int, **fields: Any) -> Plan:
    return Plan(mesh=Mesh(replicate=workers), timeout_s=60, **fields)


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


@pytest.mark.parametrize("mesh", [Mesh(shard=3), Mesh(replicate=2, tensor=2)], ids=["zero", "tensor"])
def test_what_only_the_lost_worker_held_is_still_there(mesh: Mesh, tmp_path: Path, undisturbed: Trace) -> None:
    plan = Plan(mesh=mesh, zero=3 if mesh.shard > 1 else 0, timeout_s=60, on_loss=OnLoss(snapshot="1"))
    awaited = mesh.workers if mesh.shard > 1 else 0
    ended = train(tmp_path, plan, [fail_at(1, 20, point="all-reduce")], awaited=awaited)
    check(ended, undisturbed, faults=1, sharers=mesh.tensor)
    assert ended.of_kind("loss")[0]["lost_steps"] <= 1


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

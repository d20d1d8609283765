"""Runs of a small job whose workers are killed, and how they must have ended."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.shm import kept
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.fault.checkpoint.manifest import committed
from shoal.fault.inject import Fault, environment, struck
from shoal.launch.cause import find_cause
from shoal.launch.local import Watch, launch_local
from shoal.launch.starting import workers_of
from shoal.spec.plan import Mesh, Plan
from shoal.training.host import this_host
from shoal.training.jobfile import load_job
from shoal.training.prepare import write_run
from shoal.training.resolve import resolve_plan
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 16), nn.Linear(16, 12)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


job = shoal.Job(
    model=lambda: nn.Sequential(nn.Linear(6, 12), Block(), Block(), nn.Linear(12, 1)),
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


def job_file(folder: Path) -> Path:
    path = folder / "job.py"
    path.write_text(JOB)
    return path


def train(folder: Path, plan: Plan, faults: list[Fault], *, awaited: int = 0) -> Ended:
    """Train the job by processes of which some are killed."""
    file = job_file(folder)
    job = load_job(file)
    plan, _ = resolve_plan(job, plan)
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
            workers_of(run.path), workers=plan.workers, timeout_s=60, watch=watch, on_loss=plan.on_loss, folder=run
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
        memory.append(kept.SHARED / f"shoal-room-{os.geteuid()}-{token}")
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


def undisturbed_run(folder: Path) -> Trace:
    """Return the losses and samples of a run to which nothing happens."""
    job = load_job(job_file(folder))
    return reference(job, job.total_steps)

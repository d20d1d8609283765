"""Local steps against the obvious: as many models in one process, trained apart, and averaged by hand."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.events import EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.parts import cut
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.loop import train_all
from shoal.training.opening import open_run
from tests.support.jobs import linear
from tests.support.ranks import RankPool
from tests.support.training import batch_samples, build, reference

TOLERANCE = 1e-6
"""Of float32, for numbers below 1: what a sum in another order makes."""
STEPS = 12
SHARES = (0.5, 0.3, 0.2)


def adam(**fields: Any) -> Job:
    """A regression with a schedule and clipping, whose seventh batch is a partial one of 2 samples."""
    return linear(
        **{
            "steps": STEPS,
            "optimizer": lambda parameters: torch.optim.AdamW(parameters, lr=0.02),
            "schedule": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.8),
            "clip_norm": 0.5,
            **fields,
        }
    )


def plain(**fields: Any) -> Job:
    """A regression with SGD."""
    return linear(**{"steps": STEPS, "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), **fields})


def evaluated(**fields: Any) -> Job:
    """The first, evaluated after every fifth step."""
    job = adam()
    return adam(eval_data=job.data, eval_every_steps=5, **fields)


@dataclass
class State:
    """What a worker has at the end."""

    parameters: list[Tensor]
    kept: list[Tensor]
    samples: list[int]


def worker(rank: Rank, *, builder: str, folder: Path, fields: dict[str, Any] | None = None) -> State:
    """Be one worker. Runs in the pool."""
    log = EventLog(RunFolder(folder).events_of(rank.index))
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    samples: list[int] = []
    try:
        with open_run(build(builder, **(fields or {})), RunFolder(folder), rank=rank, store=store, log=log) as run:
            train_all(run, on_step=lambda: None)
            parameters = [parameter.detach().clone() for parameter in run.model.parameters()]
            state = run.state.optimizer.state
            kept = [value.clone() for p in run.model.parameters() for _, value in sorted(state[p].items())]
    finally:
        log.close()
    return State(parameters, kept, samples)


def train(
    ranks: RankPool, folder: Path, builder: str, sync: Sync, *, shares: tuple[float, ...] = SHARES, **plan: Any
) -> tuple[list[State], RunFolder]:
    """Train by as many workers as there are shares."""
    whole = Plan(mesh=Mesh(replicate=len(shares)), batch=Batch(shares=shares), sync=sync, **plan)
    run = RunFolder.create(folder, None, stem="run")
    write_toml(run.plan_toml, whole)
    return ranks.run(worker, workers=whole.workers, builder=f"{__name__}:{builder}", folder=run.path), run


class Simulated:
    """Workers with local steps, one after the other in one process."""

    def __init__(self, job: Job, sync: Sync, *, shares: tuple[float, ...] = SHARES, boundaries: int = 0) -> None:
        self.job, self.sync, self.shares, self.boundaries = job, sync, shares, boundaries
        torch.manual_seed(job.seed)
        self.anchor = job.model()
        self.models = [copy.deepcopy(self.anchor) for _ in shares]
        self.optimizers = [job.optimizer(list(model.parameters())) for model in self.models]
        self.schedules = [job.schedule(optimizer) if job.schedule else None for optimizer in self.optimizers]
        self.weights = [0.0] * len(shares)
        outer = {"lr": 1.0} if sync.outer == "average" else {"lr": 0.7, "momentum": 0.9, "nesterov": True}
        self.outer = torch.optim.SGD(self.anchor.parameters(), **outer)  # type: ignore[arg-type]

    def train(self) -> "Simulated":
        for step in range(1, self.job.total_steps + 1):
            samples = batch_samples(self.job, step - 1)
            bounds = cut(len(samples), self.shares)
            for number in range(len(self.shares)):
                self._step(number, samples[bounds[number] : bounds[number + 1]])
            is_boundary = step == self.job.total_steps or bool(self.boundaries and step % self.boundaries == 0)
            if is_boundary or step % self.sync.local_steps == 0:
                self._meet(settles=is_boundary)
        return self

    def _step(self, number: int, samples: list[int]) -> None:
        model, optimizer, schedule = self.models[number], self.optimizers[number], self.schedules[number]
        if samples:
            batch = default_collate([self.job.data[i] for i in samples])
            self.job.loss(call_model(model, self.job, batch), batch).backward()
            self.weights[number] += len(samples)
        else:
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        if self.job.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), self.job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()

    @torch.no_grad()
    def _meet(self, *, settles: bool) -> None:
        total = sum(self.weights)
        for at, parameter in enumerate(self.anchor.parameters()):
            own = [list(model.parameters())[at] for model in self.models]
            pairs = zip(self.weights, own, strict=True)
            parameter.grad = torch.stack([weight / total * (parameter - p) for weight, p in pairs]).sum(0)
        self.outer.step()
        for model in self.models:
            for mine, anchor in zip(model.parameters(), self.anchor.parameters(), strict=True):
                mine.copy_(anchor)
        if settles:
            self._settle(total)
        self.weights = [0.0] * len(self.shares)

    def _settle(self, total: float) -> None:
        states = [[optimizer.state[p] for p in m.parameters()] for optimizer, m in self._pairs()]
        for of_parameter in zip(*states, strict=True):
            for key in of_parameter[0]:
                weighted = [w / total * state[key] for w, state in zip(self.weights, of_parameter, strict=True)]
                for state in of_parameter:
                    state[key].copy_(torch.stack(weighted).sum(0))

    def _pairs(self) -> list[tuple[torch.optim.Optimizer, nn.Module]]:
        return list(zip(self.optimizers, self.models, strict=True))

    def kept(self) -> list[Tensor]:
        optimizer, model = self._pairs()[0]
        return [value for p in model.parameters() for _, value in sorted(optimizer.state[p].items())]


def apart(mine: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest difference of two numbers."""
    return max(float((a - b).detach().abs().max()) for a, b in zip(mine, other, strict=True))


def test_one_local_step_with_sgd_is_all_reduce(ranks: RankPool, tmp_path: Path) -> None:
    states, _ = train(ranks, tmp_path, "plain", Sync(mode="local"))
    assert apart(states[0].parameters, reference(plain(), STEPS).parameters) < TOLERANCE


@pytest.mark.parametrize("outer", ["average", "nesterov"])
@pytest.mark.parametrize("local_steps", [1, 4])
def test_workers_do_what_models_trained_apart_do(ranks: RankPool, tmp_path: Path, outer: str, local_steps: int) -> None:
    sync = Sync(mode="local", local_steps=local_steps, outer=outer)
    states, run = train(ranks, tmp_path, "evaluated", sync)
    expected = Simulated(evaluated(), sync, boundaries=5).train()
    for state in states:
        assert apart(state.parameters, states[0].parameters) == 0, "the same bits on all workers"
        assert apart(state.kept, states[0].kept) == 0, "of the optimizer's state, too, after the last step"
    # An optimizer like Adam makes more of what rounding leaves than SGD: 1e-6 becomes some 1e-6 times its steps.
    assert apart(states[0].parameters, list(expected.anchor.parameters())) < 10 * TOLERANCE
    assert apart(states[0].kept, expected.kept()) < 10 * TOLERANCE
    meetings = [event["step"] for event in EventReader(run.events_of(0)).poll() if event["kind"] == "meeting"]
    assert meetings == sorted({*range(local_steps, STEPS + 1, local_steps), 5, 10, STEPS})


def test_a_codec_leaves_all_workers_the_same(ranks: RankPool, tmp_path: Path) -> None:
    sync = Sync(mode="local", local_steps=3, codec="int8")
    states, _ = train(ranks, tmp_path, "plain", sync)
    expected = Simulated(plain(), sync).train()
    assert apart(states[1].parameters, states[0].parameters) == 0
    # A block's largest difference is 127 steps of int8, and moves are below 0.2.
    assert 0 < apart(states[0].parameters, list(expected.anchor.parameters())) < 5e-3


def test_going_on_from_a_checkpoint_gives_what_never_stopping_gives(ranks: RankPool, tmp_path: Path) -> None:
    sync = Sync(mode="local", local_steps=4, outer="nesterov")
    settings = Checkpoints(every_steps=6, keep=9)
    whole, _ = train(ranks, tmp_path / "a", "adam", sync, checkpoint=settings)
    _, run = train(ranks, tmp_path / "b", "halfway", sync, checkpoint=settings)
    resumed = ranks.run(worker, workers=3, builder=f"{__name__}:adam", folder=run.path)
    assert apart(resumed[0].parameters, whole[0].parameters) == 0


def halfway() -> Job:
    """The job to its first checkpoint."""
    return adam(steps=6)


@pytest.mark.parametrize("workers", [1, 2])
def test_another_number_of_workers_goes_on(ranks: RankPool, tmp_path: Path, workers: int) -> None:
    sync = Sync(mode="local", local_steps=4, outer="nesterov")
    settings = Checkpoints(every_steps=6, keep=9)
    _, run = train(ranks, tmp_path, "halfway", sync, checkpoint=settings)
    write_toml(run.plan_toml, Plan(mesh=Mesh(replicate=workers), sync=sync, checkpoint=settings))
    states = ranks.run(worker, workers=workers, builder=f"{__name__}:adam", folder=run.path)
    steps = [event for event in EventReader(run.events_of(0)).poll() if event["kind"] == "step"]
    assert [event["step"] for event in steps[6:]] == list(range(7, STEPS + 1))
    assert all(torch.isfinite(parameter).all() for parameter in states[0].parameters)


def test_a_step_says_who_took_part(ranks: RankPool, tmp_path: Path) -> None:
    _, run = train(ranks, tmp_path, "plain", Sync(mode="local", local_steps=4))
    for number in range(3):
        steps = [event for event in EventReader(run.events_of(number)).poll() if event["kind"] == "step"]
        assert len(steps) == STEPS, json.dumps(steps)
        for event in steps:
            is_meeting = event["step"] % 4 == 0
            alone = [number] if event["weight"] else []
            assert event["took_part"] == ([0, 1, 2] if is_meeting else alone)
            assert event["met_weight"] == (8 if is_meeting else event["weight"])

"""Everything that training depends on is in a checkpoint: optimizers, schedules, buffers, random states, codecs."""

import dataclasses
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from shoal.comm.rank import ALONE, Rank
from shoal.compress.codecs import codec_named
from shoal.compress.feedback import ErrorFeedback
from shoal.core.run_folder import RunFolder
from shoal.fault.checkpoint.manifest import committed
from shoal.spec.job import Job
from shoal.spec.plan import Checkpoints, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.saved_codec import codec_wanted, restore_codec
from tests.support.jobs import linear
from tests.support.ranks import RankPool
from tests.support.training import bare_folder, largest_difference, train_part

STEPS, STOPPED = 8, 3
KEPT = Checkpoints(every_steps=1, keep=100)


class OwnAdam(torch.optim.Adam):
    """A class of one's own: it is given DTensors where parameters are sharded."""


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AMSGrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1, t0=2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "one's own": lambda p: OwnAdam(p, lr=0.01),
    "lr as a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01)),
    "groups": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.1}, {"params": p[1:], "betas": (0.5, 0.9)}]),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: lr_scheduler.StepLR(o, step_size=2, gamma=0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, milestones=[2, 5]),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=10),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=20),
    "warm-up": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


class Mixed(nn.Module):
    """Batch norm, a frozen layer, and a buffer that the forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output, which depends on how often this was called."""
        self.calls: torch.Tensor
        self.calls += 1
        output: torch.Tensor = self.out(self.norm(self.frozen(x)))
        return output * self.calls


def mixed(steps: int) -> Job:
    """A job with all kinds of state outside of trained parameters."""
    return linear(steps=steps, model=Mixed)


def noisy(steps: int) -> Job:
    """A job whose loss draws random numbers, of Python, NumPy and torch."""

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        noise = random.random() + float(np.random.rand()) + torch.randn((), generator=torch.default_generator)
        error: torch.Tensor = (output[:, 0] - batch[1]) ** 2
        return error.mean() * (3 + noise)

    return linear(steps=steps, loss=loss)


def optimized(steps: int, name: str) -> Job:
    """The regression with the optimizer `name`."""
    return linear(steps=steps, optimizer=OPTIMIZERS[name])


def scheduled(steps: int, name: str) -> Job:
    """The regression with the schedule `name`."""
    return linear(steps=steps, schedule=SCHEDULES[name])


def part(rank: Rank, *, builder: str, arguments: dict[str, object], folder: Path) -> list[float]:
    """Be one worker, and return the losses. Runs in the pool."""
    random.seed(rank.index)  # as each process begins otherwise
    np.random.seed(rank.index)
    return train_part(rank, builder=builder, arguments=arguments, plan=Plan(), folder=folder).losses


def compare(
    tmp_path: Path,
    plan: Plan,
    builder: str,
    *,
    ranks: RankPool | None = None,
    then: Plan | None = None,
    **settings: Any,
) -> tuple[list[float], list[float]]:
    """Return the losses after STOPPED of a run that goes on then, perhaps under another plan, and of the whole run."""

    def train(folder: Path, workers: int) -> list[float]:
        arguments: dict[str, Any] = {"builder": builder, "arguments": {"steps": STEPS, **settings}, "folder": folder}
        if ranks is None:
            return part(ALONE, **arguments)
        found: list[float] = ranks.run(part, workers=workers, **arguments)[0]
        return found

    whole = bare_folder(tmp_path, dataclasses.replace(plan, checkpoint=KEPT))
    expected = train(whole, plan.workers)
    begun = bare_folder(tmp_path, then or plan)
    checkpoint = committed(RunFolder(whole).checkpoints)[STOPPED - 1]
    shutil.copytree(checkpoint, RunFolder(begun).checkpoints / checkpoint.name)
    return train(begun, (then or plan).workers), expected[STOPPED:]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_alike(name: str, tmp_path: Path) -> None:
    found, expected = compare(tmp_path, Plan(), f"{__name__}:optimized", name=name)
    assert found == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_goes_on_alike(name: str, tmp_path: Path) -> None:
    found, expected = compare(tmp_path, Plan(), f"{__name__}:scheduled", name=name)
    assert found == expected


@pytest.mark.parametrize("builder", ["mixed", "noisy"])
def test_buffers_frozen_parameters_and_random_states_go_on_alike(builder: str, tmp_path: Path) -> None:
    found, expected = compare(tmp_path, Plan(), f"{__name__}:{builder}")
    assert found == expected


@pytest.mark.parametrize("name", ["one's own", "NAdam"])
def test_optimizers_of_shards_go_on_alike(name: str, ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(shard=2), zero=3)
    found, expected = compare(tmp_path, plan, f"{__name__}:optimized", ranks=ranks, name=name)
    assert found == expected


@pytest.mark.parametrize("codec", ["topk", "int8", "threshold"])
def test_what_a_codec_has_not_sent_is_kept(codec: str, ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(shard=2), zero=2, sync=Sync(codec=codec))
    found, expected = compare(tmp_path, plan, "tests.support.jobs:linear", ranks=ranks)
    assert found == expected


@pytest.mark.parametrize("codec", ["topk", "powersgd"])
def test_what_replicas_have_not_sent_is_kept(codec: str, ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(replicate=2), sync=Sync(codec=codec))
    found, expected = compare(tmp_path, plan, "tests.support.jobs:linear", ranks=ranks)
    # DDP makes its buckets anew after the first step of a process, and the codec picks from a whole bucket.
    assert largest_difference(found, expected) < 1e-5


def test_auto_goes_on_with_the_codec_of_the_checkpoint_whatever_it_would_choose(
    ranks: RankPool, tmp_path: Path
) -> None:
    plan = Plan(mesh=Mesh(replicate=2), sync=Sync(codec="topk"))
    auto = dataclasses.replace(plan, sync=Sync(codec="auto"))  # on one host it would take none
    found, expected = compare(tmp_path, plan, "tests.support.jobs:linear", ranks=ranks, then=auto)
    assert largest_difference(found, expected) < 1e-5


def test_what_a_codec_has_not_sent_is_handed_over_to_fewer_workers(ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(replicate=3), sync=Sync(codec="topk"))
    fewer = dataclasses.replace(plan, mesh=Mesh(replicate=2))
    found, expected = compare(tmp_path, plan, "tests.support.jobs:linear", ranks=ranks, then=fewer)
    # Other workers choose other numbers to send: it trains alike, but not bit for bit.
    assert largest_difference(found, expected) < 0.3


def test_auto_takes_another_codec_where_the_plan_cannot_have_that_of_the_checkpoint() -> None:
    plan = Plan(mesh=Mesh(shard=2), zero=2, sync=Sync(codec="auto"))
    run: Any = SimpleNamespace(feedback=ErrorFeedback(codec_named("int8")), plan=plan)
    alike = {"codec": {"codec": "powersgd", "exchanges": 3}, "mesh": dataclasses.asdict(Mesh(replicate=2))}
    said: list[str] = []
    assert codec_wanted(run, {}, alike) == []
    restore_codec(run, {}, alike, say=said.append)
    assert len(said) == 1
    assert said[0].startswith("What codec='powersgd' had not sent yet is dropped: this plan cannot have it")


@pytest.mark.parametrize(
    ("mesh", "feedback", "sentence"),
    [
        (Mesh(replicate=2, tensor=2), object(), "it was of slices that this mesh does not have"),
        (Mesh(replicate=2, pipeline=2), object(), "it was of slices that this mesh does not have"),
        (Mesh(), None, "this run has no codec"),
    ],
)
def test_where_what_a_codec_has_not_sent_is_dropped_that_is_said(mesh: Mesh, feedback: object, sentence: str) -> None:
    run: Any = SimpleNamespace(feedback=feedback, plan=Plan(mesh=mesh))
    alike = {"codec": {"codec": "topk", "exchanges": 3}, "mesh": dataclasses.asdict(Mesh(replicate=2))}
    said: list[str] = []
    restore_codec(run, {}, alike, say=said.append)
    assert len(said) == 1
    assert said[0].startswith("What ")
    assert f"had not sent yet is dropped: {sentence}." in said[0]

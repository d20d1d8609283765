"""What every way for gradients to meet must do: one training of each, by real processes, seen from all sides."""

import dataclasses
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.comm.rank import ALONE, Rank
from shoal.comm.store import connect
from shoal.core.events import EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.loop import train_all
from shoal.training.opening import open_run
from shoal.training.resolve import resolve_plan
from tests.support.ranks import RankPool
from tests.support.training import reference

STEPS, EVERY = 120, 40
BOUNDARIES = [40, 80, 120]
SHARES = (0.5, 0.25, 0.25)
MODES = {
    "all-reduce": Sync(),
    "local": Sync(mode="local", local_steps=4),
    "local, every step": Sync(mode="local"),
    "local, nesterov": Sync(mode="local", local_steps=4, outer="nesterov", outer_momentum=0.5),
    "local, int8": Sync(mode="local", local_steps=4, codec="int8"),
    "deadline": Sync(mode="deadline"),
    "deadline, quorum": Sync(mode="deadline", quorum=2),
    "servers": Sync(mode="server", servers=2),
    "servers, asynchronous": Sync(mode="server", servers=2, asynchronous=True),
}
EXACT = ("all-reduce", "local, every step", "servers")
"""Those that do what one process does, whoever is slow."""
WORSE, FEWER = 1.03, 1.1
"""How far above the least loss that there is a run may end; and one that leaves out the samples of late workers."""


def regression() -> Job:
    """Least squares with noise: a bowl, whose lowest point is known."""
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(115, 6, generator=generator)
    y = x @ torch.arange(1.0, 7.0) + 2 + 0.5 * torch.randn(115, generator=generator)
    data = TensorDataset(x, y)
    return Job(
        model=lambda: nn.Linear(6, 1),
        loss=lambda output, batch: ((output[:, 0] - batch[1]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS),
        data=data,
        eval_data=data,
        eval_every_steps=EVERY,
        batch_size=12,
        steps=STEPS,
    )


@cache
def least_loss() -> float:
    """Return the mean of the squares at the lowest point."""
    x, y = regression().data.tensors
    bias = torch.cat([x, torch.ones(len(x), 1)], dim=1)
    return float(((bias @ torch.linalg.lstsq(bias, y).solution - y) ** 2).mean())


@dataclass
class Told:
    """What a worker tells of its run."""

    at_boundaries: dict[int, Tensor]
    """Its parameters after each boundary."""
    parameters: list[Tensor]


def worker(rank: Rank, *, folder: Path) -> Told:
    """Be one worker. Runs in the pool."""
    log = EventLog(RunFolder(folder).events_of(rank.index))
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    seen: dict[int, Tensor] = {}
    try:
        with open_run(regression(), RunFolder(folder), rank=rank, store=store, log=log) as run:

            def on_step() -> None:
                if run.step_count % EVERY == 0 and (run.loose is None or run.loose.is_settled):
                    state = run.state.optimizer.state_dict()["state"].values()
                    kept = [value for each in state for value in each.values() if isinstance(value, Tensor)]
                    whole = [*run.model.parameters(), *kept]
                    seen[run.step_count] = torch.cat([tensor.detach().reshape(-1) for tensor in whole])

            train_all(run, on_step=on_step)
            return Told(seen, [parameter.detach().clone() for parameter in run.model.parameters()])
    finally:
        log.close()


@dataclass
class Ended:
    """A run that has ended."""

    folder: RunFolder
    plan: Plan
    told: list[Told]

    def events(self, kind: str) -> dict[int, list[dict[str, Any]]]:
        """Return the events of a kind, by worker."""
        logs = {number: EventReader(self.folder.events_of(number)).poll() for number in range(self.plan.workers)}
        return {number: [event for event in log if event["kind"] == kind] for number, log in logs.items()}

    @property
    def last_loss(self) -> float:
        return float(self.events("eval")[0][-1]["metrics"]["loss"])


def train(ranks: RankPool, folder: Path, sync: Sync, *, shares: tuple[float, ...], saved: Path | None = None) -> Ended:
    """Train by as many workers as there are shares; go on from a checkpoint that was `saved`."""
    workers = len(shares)
    sync = dataclasses.replace(sync, servers=min(sync.servers, workers), quorum=min(sync.quorum, workers))
    plan = Plan(
        mesh=Mesh(replicate=workers),
        batch=Batch(shares=shares, micro_batch=4),
        sync=sync,
        checkpoint=Checkpoints(every_steps=EVERY, keep=9),
        timeout_s=60,
    )
    plan, _ = resolve_plan(regression(), plan)
    run = RunFolder.create(folder, None, stem="run")
    write_toml(run.plan_toml, plan)
    if saved is not None:
        shutil.copytree(saved, run.checkpoints / saved.name)
    if plan.workers == 1:
        return Ended(run, plan, [worker(ALONE, folder=run.path)])
    return Ended(run, plan, ranks.run(worker, workers=plan.workers, folder=run.path))


_ENDED: dict[str, Ended] = {}


@pytest.fixture(params=list(MODES))
def name(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture
def ended(name: str, ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """A training of three workers, of which one takes half of each batch, in two micro-batches.

    The last batch of an epoch is partial.
    """
    if name not in _ENDED:
        _ENDED[name] = train(ranks, tmp_path_factory.mktemp("contract"), MODES[name], shares=SHARES)
    return _ENDED[name]


def assert_trained(ended: Ended) -> None:
    worse = FEWER if ended.plan.sync.mode == "deadline" else WORSE
    assert least_loss() <= ended.last_loss < worse * least_loss()


def test_a_bowl_is_trained_to_its_lowest_point(ended: Ended) -> None:
    assert_trained(ended)


def test_those_that_are_exact_train_what_one_process_trains(name: str, ended: Ended) -> None:
    if name not in EXACT:
        pytest.skip("it is another way to train")
    expected = reference(regression(), STEPS).parameters
    for mine, other in zip(ended.told[0].parameters, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)  # of float32, added in another order


def test_all_hold_the_same_bits_after_boundaries(ended: Ended) -> None:
    first = ended.told[0].at_boundaries
    assert list(first) == BOUNDARIES
    for told in ended.told[1:]:
        assert list(told.at_boundaries) == list(first)
        assert all(torch.equal(told.at_boundaries[step], held) for step, held in first.items())


def test_each_sample_counts_once(ended: Ended) -> None:
    """By what the workers have computed; a late one leaves steps out, and so does this count where one was late."""
    parts: dict[tuple[int, int], int] = {}
    by_worker = ended.events("step")
    for number, events in by_worker.items():
        for event in events:
            key = event["step"], event.get("part", number)
            if key[1] >= 0:
                assert key not in parts, "no part is done twice"
                parts[key] = event["samples"]
    per_epoch = [12] * 9 + [7]
    skipped = {step for step in range(1, STEPS + 1) for part in range(3) if (step, part) not in parts}
    if ended.plan.sync.mode != "deadline":
        assert not skipped
    for step in set(range(1, STEPS + 1)) - skipped:
        assert sum(parts[step, part] for part in range(3)) == per_epoch[(step - 1) % 10]


def test_what_is_computed_counts_in_one_step_with_its_weight(ended: Ended) -> None:
    sync = ended.plan.sync
    if sync.mode == "all-reduce":
        pytest.skip("its events have it by definition")
    events = [event for log in ended.events("step").values() for event in log]
    computed = sum(event["weight"] for event in events)
    if sync.mode == "local" or sync.asynchronous:
        assert computed == STEPS // 10 * 115  # an epoch is 10 steps
        return
    # A worker that was late has an event of the step that it was late for, and of it says what has become of it.
    met = {event["step"] + event["staleness"]: event["met_weight"] for event in events}
    late = sum(event["weight"] for event in events if event["staleness"])
    assert sum(met.values()) == computed - (late if sync.late == "drop" else 0)


def test_events_say_who_took_part(ended: Ended) -> None:
    if ended.plan.sync.mode == "all-reduce":
        pytest.skip("all do")
    for number, events in ended.events("step").items():
        for event in events:
            assert event["staleness"] >= 0
            assert set(event["took_part"]) <= {0, 1, 2}
            dropped = event["staleness"] and ended.plan.sync.late == "drop"
            assert not event["weight"] or dropped or number in event["took_part"]
            assert event["met_weight"] >= 0


def test_there_are_evaluations_and_checkpoints_at_boundaries(ended: Ended) -> None:
    assert [event["step"] for event in ended.events("eval")[0]] == BOUNDARIES
    assert [step_of(path) for path in committed(ended.folder.checkpoints)] == BOUNDARIES


@pytest.mark.parametrize("workers", [1, 2])
def test_another_number_of_workers_goes_on(ended: Ended, ranks: RankPool, tmp_path: Path, workers: int) -> None:
    saved = committed(ended.folder.checkpoints)[1]
    resumed = train(ranks, tmp_path, ended.plan.sync, shares=(1 / workers,) * workers, saved=saved)
    assert min(event["step"] for log in resumed.events("step").values() for event in log) == BOUNDARIES[1] + 1
    assert_trained(resumed)


def test_the_same_workers_go_on_as_if_they_had_never_stopped(ended: Ended, ranks: RankPool, tmp_path: Path) -> None:
    if ended.plan.sync.mode == "deadline" or ended.plan.sync.asynchronous:
        pytest.skip("who is in time is different each time")
    resumed = train(ranks, tmp_path, ended.plan.sync, shares=SHARES, saved=committed(ended.folder.checkpoints)[1])
    for mine, other in zip(resumed.told[0].parameters, ended.told[0].parameters, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)  # sums of servers come in any order

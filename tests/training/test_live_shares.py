"""Live shares in real runs: a slow worker gets fewer samples, and what is trained stays what one process trains."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from torch.utils.data import TensorDataset

from shoal.comm.rank import Rank
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.data.steps import StepLoader
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training import shares
from shoal.training.shares import LiveShares, can_follow, noise_of, together
from tests.support.jobs import linear
from tests.support.ranks import RankPool
from tests.support.training import Trace, bare_folder, largest_difference, reference, train_part

WORKERS, SLOW, SAMPLE_S = 3, 1, 0.0015
SOON: dict[str, Any] = {"_EVERY_S": 0.02, "_LEAST_STEPS": 3, "_FIRST_STEPS": 5, "_FIRST_S": 0.0}


def slow_job(*, index: int = 0, steps: int, **fields: Any) -> Job:
    """A regression in which each sample costs some time; on worker SLOW, four times as much."""
    wait_s = SAMPLE_S * (4 if index == SLOW else 1)

    def inputs(batch: Any) -> Any:
        time.sleep(wait_s * len(batch[0]))
        return batch[0]

    return linear(num_samples=150, batch_size=24, steps=steps, inputs=inputs, **fields)


def train_slow(rank: Rank, *, steps: int, plan: Plan, folder: Path) -> Trace:
    """Be one worker of `slow_job`, with shares that change soon."""
    builder = "tests.training.test_live_shares:slow_job"
    with mock.patch.multiple(shares, **SOON):
        return train_part(
            rank, builder=builder, arguments={"index": rank.index, "steps": steps}, plan=plan, folder=folder
        )


def shares_in(folder: Path) -> list[dict[str, Any]]:
    """Return the changes that a run wrote down."""
    return [event for event in EventReader(RunFolder(folder).events_of(0)).poll() if event["kind"] == "shares"]


@pytest.mark.parametrize(
    ("mesh", "zero", "micro_batch"),
    [(Mesh(replicate=WORKERS), 0, None), (Mesh(replicate=WORKERS), 0, 5), (Mesh(shard=WORKERS), 3, None)],
    ids=["replicas", "micro-batches", "ZeRO-3"],
)
def test_a_slow_worker_takes_less_and_the_losses_stay_those_of_one_process(
    mesh: Mesh, zero: int, micro_batch: int | None, ranks: RankPool, tmp_path: Path
) -> None:
    steps = 26
    plan = Plan(mesh=mesh, zero=zero, batch=Batch(micro_batch=micro_batch))
    folder = bare_folder(tmp_path, plan)
    traces = ranks.run(train_slow, workers=WORKERS, steps=steps, plan=plan, folder=folder)
    expected = reference(linear(num_samples=150, batch_size=24, steps=steps), steps)
    assert largest_difference(traces[0].losses, expected.losses) < 1e-5
    for step in range(steps):
        together_seen = sorted(sample for trace in traces for sample in trace.samples[step])
        assert together_seen == sorted(expected.samples[step])
    changes = shares_in(folder)
    assert changes, "nothing has changed"
    assert changes[0]["step"] > SOON["_FIRST_STEPS"]
    for change, after in zip(changes, [*changes[1:], {"step": steps + 1}], strict=True):
        whole = [s for s in range(change["step"] - 1, after["step"] - 1) if len(expected.samples[s]) == 24]
        assert all([len(trace.samples[step]) for trace in traces] == change["samples"] for step in whole)
    parts = changes[-1]["samples"]
    assert sum(parts) == 24
    assert parts[SLOW] < 8 < min(parts[0], parts[2])
    assert changes[0]["seconds_per_sample"][SLOW] > 2 * changes[0]["seconds_per_sample"][0]


def test_a_run_that_is_gone_on_with_keeps_its_shares(ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(replicate=WORKERS), checkpoint=Checkpoints(every_steps=20))
    folder = bare_folder(tmp_path, plan)
    ranks.run(train_slow, workers=WORKERS, steps=20, plan=plan, folder=folder)
    parts = shares_in(folder)[-1]["samples"]
    traces = ranks.run(train_slow, workers=WORKERS, steps=22, plan=plan, folder=folder)
    assert [len(trace.samples[1]) for trace in traces] == parts, "step 22; step 21 has a last, partial batch"
    expected = reference(linear(num_samples=150, batch_size=24, steps=22), 22)
    assert largest_difference(traces[0].losses, expected.losses[20:]) < 1e-5


def test_shares_stay_where_the_plan_says_so(ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(replicate=WORKERS), batch=Batch(live=False))
    folder = bare_folder(tmp_path, plan)
    traces = ranks.run(train_slow, workers=WORKERS, steps=12, plan=plan, folder=folder)
    assert not shares_in(folder)
    assert {len(samples) for trace in traces for samples in trace.samples[:6]} == {8}


def test_they_follow_only_where_they_can() -> None:
    replicas = Plan(mesh=Mesh(replicate=4))
    assert can_follow(replicas, meets=False, batch_size=8)
    assert not can_follow(replicas, meets=False, batch_size=3)
    assert not can_follow(Plan(), meets=False, batch_size=8)
    assert not can_follow(Plan(mesh=Mesh(replicate=2, pipeline=2)), meets=False, batch_size=8)
    assert not can_follow(Plan(mesh=Mesh(replicate=4), sync=Sync(mode="local")), meets=False, batch_size=8)
    sharded = Plan(mesh=Mesh(shard=4), zero=3, batch=Batch(micro_batch=2))
    assert not can_follow(sharded, meets=True, batch_size=8)


def test_the_slowest_worker_of_a_replica_counts() -> None:
    said = [
        {"samples": 4, "seconds": s, "fixed_s": 0.1, "step_s": 2.0, "noise": 0.01, "most": most}
        for s, most in ((1.0, 9), (2.0, 8), (0.5, 7), (0.4, 6))
    ]
    window = together(said, Plan(mesh=Mesh(replicate=2, tensor=2)))
    assert window is not None
    assert window.seconds == (2.0, 0.5)
    assert window.most == (8, 6)
    assert together([*said[:3], {"samples": 0}], Plan(mesh=Mesh(replicate=2, tensor=2))) is None


def test_noise_is_the_standard_error_of_a_median() -> None:
    assert noise_of([1.0] * 9) == 0
    assert noise_of([0.9, 1.0, 1.1] * 3) == pytest.approx(1.2533 * 1.4826 * 0.1 / 3)


def live_of(numbers: tuple[int, ...], plan: Plan) -> LiveShares:
    """Return the shares of a worker of a run by these `numbers`."""
    rank = Rank(0, len(numbers), 0, len(numbers), "", 0, store_is_hosted=False, numbers=numbers)
    job = linear(num_samples=64, batch_size=32)
    run: Any = SimpleNamespace(rank=rank, plan=plan, job=job, layout=SimpleNamespace(meets=False))
    unused: Any = None
    return LiveShares(run, log=unused, memory=unused, clock=unused)


def test_those_who_are_left_keep_their_shares_among_themselves() -> None:
    plan = Plan(mesh=Mesh(replicate=4), batch=Batch(shares=(10 / 32, 10 / 32, 10 / 32, 2 / 32)))
    saved = live_of((0, 1, 2, 3), plan).saved()
    assert saved == {"workers": [0, 1, 2, 3], "shares": [10 / 32, 10 / 32, 10 / 32, 2 / 32]}
    assert live_of((0, 1, 2, 3), Plan(mesh=Mesh(replicate=4))).restored(saved) == plan.shares
    left = live_of((0, 2, 3), Plan(mesh=Mesh(replicate=3))).restored(saved)
    assert left == pytest.approx((10 / 22, 10 / 22, 2 / 22))
    assert live_of((0, 1, 2, 3, 4), Plan(mesh=Mesh(replicate=5))).restored(saved) is None
    assert live_of((0, 1, 2, 3), Plan(mesh=Mesh(replicate=4), batch=Batch(live=False))).restored(saved) is None
    assert (
        live_of((0, 1, 2, 3), Plan(mesh=Mesh(replicate=4), batch=Batch(shares=(0.4, 0.2, 0.2, 0.2)))).restored(saved)
        is None
    ), "who names shares gets them"
    assert live_of((0, 1), Plan(mesh=Mesh(replicate=2))).restored(None) is None


def test_a_loader_goes_on_by_other_shares_from_any_step() -> None:
    data = TensorDataset(linear().data.tensors[0])
    settings: dict[str, Any] = {"batch_size": 8, "last_step": 14, "seed": 3}
    equal = [list(StepLoader(data, shares=(0.5, 0.5), index=i, **settings)) for i in range(2)]
    loaders = [StepLoader(data, shares=(0.5, 0.5), index=i, **settings) for i in range(2)]
    begun = [[part for part, _ in zip(loader, range(5), strict=False)] for loader in loaders]
    for loader in loaders:
        loader.go_on(6, (0.75, 0.25))
    loaded = [first + list(loader) for first, loader in zip(begun, loaders, strict=True)]
    for step, parts in enumerate(zip(*loaded, strict=True)):
        whole = [part[step].samples for part in equal]
        assert [part.step for part in parts] == [step + 1] * 2
        assert parts[0].samples + parts[1].samples == whole[0] + whole[1]
        if len(whole[0] + whole[1]) == 8:
            assert len(parts[0].samples) == (4 if step < 5 else 6)

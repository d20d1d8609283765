"""Exact gradients: weights that are not samples, parts that are empty, replicas that must start alike."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.events import STEP_PARTS, EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.training.opening import open_run
from tests.support.ranks import RankPool, WorkerError
from tests.support.training import Trace, bare_folder, build, largest_difference, reference, train_part

UNEQUAL = (0.25, 0.25, 0.10, 0.4)


def train(
    ranks: RankPool,
    folder: Path,
    job: str,
    *,
    shares: tuple[float, ...],
    micro_batch: int | None = None,
    **arguments: Any,
) -> list[Trace]:
    plan = Plan(mesh=Mesh(replicate=len(shares)), batch=Batch(shares=shares, micro_batch=micro_batch))
    options = {"builder": f"tests.support.jobs:{job}", "arguments": arguments, "plan": plan}
    return ranks.run(train_part, workers=len(shares), folder=bare_folder(folder, plan), **options)


def assert_same(traces: list[Trace], expected: Trace, record: dict[str, float], name: str) -> None:
    """Losses to 1e-5 and final parameters to 1e-4 of their size: sums in another order, over a dozen steps."""
    record[name] = largest_difference(traces[0].losses, expected.losses)
    assert record[name] <= 1e-5
    for trace in traces:
        for ours, theirs in zip(trace.parameters, expected.parameters, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [None, 1, 2])
@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), UNEQUAL])
def test_losses_weighted_by_tokens_are_right_under_unequal_shares(
    shares: tuple[float, ...],
    micro_batch: int | None,
    ranks: RankPool,
    tmp_path: Path,
    record_difference: dict[str, float],
) -> None:
    expected = reference(build("tests.support.jobs:padded", steps=20), 20)
    traces = train(ranks, tmp_path, "padded", shares=shares, micro_batch=micro_batch, steps=20)
    assert_same(traces, expected, record_difference, f"padded  shares={shares} micro_batch={micro_batch}")


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_a_part_of_nothing_but_padding_counts_nothing(
    micro_batch: int | None, ranks: RankPool, tmp_path: Path, record_difference: dict[str, float]
) -> None:
    # Samples 2 and 3 of every batch of 4 are worker 1's whole part, and have no token that counts.
    arguments = {"steps": 12, "batch_size": 4, "only_padding": (2, 3, 6, 7)}
    expected = reference(build("tests.support.jobs:padded", **arguments), 12)
    traces = train(ranks, tmp_path, "padded", shares=(0.5, 0.5), micro_batch=micro_batch, **arguments)
    assert_same(traces, expected, record_difference, f"padding only, micro_batch={micro_batch}")


@pytest.mark.parametrize(("num_samples", "batch_size", "shares"), [
    (50, 8, (1 / 3,) * 3),  # a last batch of 2 for 3 workers: one has nothing
    (17, 4, (0.25,) * 4),  # a last batch of 1
    (52, 7, (0.5, 0.5)),  # a batch that nothing divides
    (9, 64, UNEQUAL),  # a batch larger than the data
])  # fmt: skip
def test_a_last_partial_batch_is_used_and_weighs_what_it_has(
    num_samples: int,
    batch_size: int,
    shares: tuple[float, ...],
    ranks: RankPool,
    tmp_path: Path,
    record_difference: dict[str, float],
) -> None:
    arguments = {"num_samples": num_samples, "batch_size": batch_size, "steps": 16}
    expected = reference(build("tests.support.jobs:linear", **arguments), 16)
    traces = train(ranks, tmp_path, "linear", shares=shares, **arguments)
    assert_same(traces, expected, record_difference, f"linear  {num_samples} samples by {batch_size}, {shares}")
    for step in range(16):
        assert sorted(s for t in traces for s in t.samples[step]) == sorted(expected.samples[step])


def train_from_own_seed(rank: Rank, *, folder: Path) -> tuple[torch.Tensor, float]:
    """Be a worker whose model starts from a seed, and a buffer, of its own."""

    def model() -> torch.nn.Module:
        torch.manual_seed(100 + rank.index)
        module = torch.nn.Linear(5, 1)
        module.register_buffer("mark", torch.full((1,), float(rank.index)))
        return module

    job = build("tests.support.jobs:linear", model=model, steps=3)
    log = EventLog(RunFolder(folder).events_of(rank.index))
    with open_run(job, RunFolder(folder), rank=rank, store=connect(rank, timeout_s=60), log=log) as run:
        for batch in run.batches():
            run.step(batch)
        weights = run.model.weight.detach().clone()  # type: ignore[operator]
        return weights, float(run.model.mark)  # type: ignore[arg-type]


def test_replicas_start_from_the_weights_and_buffers_of_worker_0_whatever_their_seeds(
    ranks: RankPool, tmp_path: Path
) -> None:
    results = ranks.run(train_from_own_seed, workers=3, folder=bare_folder(tmp_path, Plan(mesh=Mesh(replicate=3))))
    for weights, mark in results:
        assert torch.equal(weights, results[0][0])
        assert mark == 0.0


def test_clipping_and_schedules_are_those_of_one_process(
    ranks: RankPool, tmp_path: Path, record_difference: dict[str, float]
) -> None:
    expected = reference(build("tests.support.jobs:clipped", steps=15), 15)
    traces = train(ranks, tmp_path, "clipped", shares=UNEQUAL, steps=15)
    assert_same(traces, expected, record_difference, "clipped and scheduled")


def test_parameters_without_a_gradient_are_named(ranks: RankPool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as raised:
        train(ranks, tmp_path, "unused", shares=(0.5, 0.5), steps=2)
    sentence = "JobError: 2 parameter(s) got no gradient at step 1: spare.weight, spare.bias. With several workers"
    assert sentence in str(raised.value)


@pytest.mark.parametrize("shares", [(1.0,), (0.5, 0.5), UNEQUAL])
def test_batch_norm_takes_its_statistics_over_all_workers(
    shares: tuple[float, ...], ranks: RankPool, tmp_path: Path, record_difference: dict[str, float]
) -> None:
    expected = reference(build("tests.support.jobs:batch_norm", steps=9), 9)  # the seventh batch is partial
    traces = train(ranks, tmp_path, "batch_norm", shares=shares, steps=9)
    assert_same(traces, expected, record_difference, f"batch norm, {shares}")


def test_bf16_trains_close_to_fp32(ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(replicate=2), precision="bf16")
    expected = reference(build("tests.support.jobs:linear", steps=10), 10)
    options = {"builder": "tests.support.jobs:linear", "arguments": {"steps": 10}, "plan": plan}
    traces = ranks.run(train_part, workers=2, folder=bare_folder(tmp_path, plan), **options)
    difference = largest_difference(traces[0].losses, expected.losses)
    assert 1e-5 < difference < 0.05  # bfloat16 has 8 bits: it must show, and must not hurt
    assert all(parameter.dtype == torch.float32 for parameter in traces[0].parameters)


def test_every_worker_writes_an_event_a_step_whose_parts_add_up(ranks: RankPool, tmp_path: Path) -> None:
    plan = Plan(mesh=Mesh(replicate=2))
    folder = bare_folder(tmp_path, plan)
    options = {"builder": "tests.support.jobs:padded", "arguments": {"steps": 6}, "plan": plan}
    traces = ranks.run(train_part, workers=2, folder=folder, **options)
    logs = [EventReader(RunFolder(folder).events_of(rank)).poll() for rank in range(2)]
    for log, trace in zip(logs, traces, strict=True):
        assert [event["kind"] for event in log] == ["start", *["step"] * 6, "comm", "data", "end"]
        steps = log[1:7]
        assert [event["loss"] for event in steps] == trace.losses
        for event in steps:
            parts = [event[name] for name in STEP_PARTS]
            assert min(parts) >= 0
            assert sum(parts) <= event["step_s"] + 1e-5  # what is in none of them is writing down the step before
        assert log[-1]["peak_bytes"] >= 0  # 0 in a warm process that has had all of it: test_memory.py has fresh ones
    for ours, theirs in zip(logs[0][1:7], logs[1][1:7], strict=True):
        total = ours["weight"] + theirs["weight"]
        assert ours["batch_weight"] == theirs["batch_weight"] == total
        mean = (ours["part_loss"] * ours["weight"] + theirs["part_loss"] * theirs["weight"]) / total
        assert ours["loss"] == pytest.approx(mean, rel=1e-5)

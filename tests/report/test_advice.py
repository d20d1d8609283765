"""Advice by hand: the examples of each bottleneck's file, in numbers, and what is not said."""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.checkpoint_flags import read_checkpoints
from shoal.cli.plan_flags import read_plan
from shoal.cli.sync_flags import read_sync
from shoal.cli.train import add_arguments
from shoal.core.errors import PlanError
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.report.advice import advise, advise_on, flags_of, follow
from shoal.report.advice.advise import ADVISERS
from shoal.report.advice.evidence import Evidence
from shoal.report.advice.follow import FLAGS
from shoal.report.logs.facts import Loading, Saved
from shoal.report.page.write import write_page
from shoal.report.summary import summarize
from shoal.report.verdict import remarks
from shoal.spec.cluster import Cluster, Node
from shoal.spec.communication import Communication
from shoal.spec.device import Link
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from shoal.spec.plan import Loading as PlanLoading
from shoal.spec.sync import Sync
from tests.support.evidence import busy, evidence, only, predicted

MakeRun = Callable[..., RunFolder]


def loading(**fields: Any) -> dict[int, Loading]:
    given = {"rank": 0, "steps": 100, "samples": 1600.0, "bytes": 1.0, "wait_s": 7.0, "fill_s": 10.0, "threads": 1}
    return {0: Loading(**{**given, "depth": 2, "storage": "dataset", **fields})}


def test_a_step_without_a_bottleneck_needs_no_advice() -> None:
    assert advise_on(evidence(busy(passes_s=0.1, data=0.002, other=0.001))) == []


def test_slow_data_needs_as_many_threads_as_fill_batches_in_time() -> None:
    run = evidence(busy(passes_s=0.03, data=0.07), loading=loading())
    advice = only(advise_on(run))
    assert advice.change == {"loading.threads": 5}  # 100 ms / (0.8 * 30 ms), rounded up
    assert advice.predicted_gain == pytest.approx(100 / 30)
    assert advice.sentence == (
        "70% of each step is spent waiting for data; 4 more loader threads are predicted to bring 3.3x."
    )


def test_where_processes_load_more_of_them_are_advised() -> None:
    run = evidence(busy(passes_s=0.03, data=0.07), loading=loading())
    run = dataclasses.replace(run, plan=dataclasses.replace(run.plan, loading=PlanLoading(workers=1)))
    advice = only(advise_on(run))
    assert advice.change == {"loading.workers": 5}
    assert "4 more loader processes are predicted" in advice.sentence


def test_a_step_that_is_nothing_but_waiting_for_data_needs_all_the_threads_there_can_be() -> None:
    advice = only(advise_on(evidence(busy(data=0.1), loading=loading())))
    assert advice.change == {"loading.threads": 64}
    assert advice.predicted_gain == pytest.approx(64)


def test_threads_that_compute_are_no_more_than_the_cores() -> None:
    slow = busy(passes_s=0.03, data=0.07)
    with_cores = only(advise_on(evidence(slow, loading=loading(fill_cpu_s=9.0), cores=2.0)))
    assert with_cores.change == {"loading.threads": 2}
    assert with_cores.predicted_gain == pytest.approx(100 / 50)
    without = only(advise_on(evidence(slow, loading=loading(fill_cpu_s=9.0), cores=1.0)))
    assert without.change is None
    assert "shoal pack" in without.sentence


def test_data_that_another_worker_is_slow_for_is_not_promised_more_than_that_one_allows() -> None:
    run = evidence(busy(0, passes_s=0.03, data=0.07), busy(1, passes_s=0.08, waiting=0.02), loading=loading())
    data = next(advice for advice in advise_on(run) if advice.bottleneck == "data")
    assert data.predicted_gain == pytest.approx(100 / 80)


def slow_link(**fields: Any) -> Evidence:
    link = Link(source="measured", bytes_per_s=12.5e6, latency_s=0.0)
    met = Communication(way="ring", why="", bucket_bytes=1 << 20, between=link)
    workers = [busy(rank, passes_s=0.05, communication=0.6) for rank in range(2)]
    return evidence(*workers, **{"communication": met, "gradient_bytes": 8_000_000, **fields})


def test_a_slow_link_is_sent_less_over() -> None:
    advice = only(advise_on(slow_link()))
    assert advice.change == {"sync.codec": "int8"}
    assert advice.predicted_gain == pytest.approx(650 / 292, rel=0.01)  # 242 - 40 ms sent, 40 ms computed, 50 ms else
    assert "waiting for gradients on their way at 12.5 MB/s" in advice.sentence


@pytest.mark.parametrize(
    "fields",
    [
        {"plan": Plan(mesh=Mesh(replicate=2), sync=Sync(codec="int8"))},
        {"plan": Plan(mesh=Mesh(replicate=2), sync=Sync(mode="local", local_steps=4))},
        {"communication": None},
        {"gradient_bytes": 0},
    ],
    ids=["has a codec", "meets seldom", "no link known", "no size known"],
)
def test_a_codec_is_advised_only_where_gradients_travel_whole_over_a_known_link(fields: dict[str, Any]) -> None:
    assert advise_on(slow_link(**fields)) == []


def test_a_straggler_gets_a_smaller_share() -> None:
    run = evidence(busy(0, samples=8, passes_s=0.016, waiting=0.048), busy(1, samples=8, passes_s=0.064))
    advice = only(advise_on(run))
    assert advice.change == {"batch.shares": (13 / 16, 3 / 16)}
    assert advice.predicted_gain == pytest.approx(64 / 26)
    assert advice.sentence.startswith("Worker 0 waits 75% of each step for worker 1, which takes 8 ms for a sample")


def test_who_has_too_large_a_share_is_not_said_to_be_slow() -> None:
    run = evidence(busy(0, samples=14, passes_s=0.112), busy(1, samples=2, passes_s=0.020, waiting=0.092))
    advice = only(advise_on(run))
    assert advice.change == {"batch.shares": (9 / 16, 7 / 16)}
    said = "for worker 0, which has 88% of each batch and takes 8 ms for a sample, others 10 ms; shares by speed"
    assert said in advice.sentence


def test_workers_that_are_late_in_turns_are_no_stragglers() -> None:
    workers = [busy(rank, samples=8, passes_s=0.05, waiting=0.014) for rank in range(2)]
    assert advise_on(evidence(*workers)) == []


def test_nobody_gets_more_samples_than_its_memory_holds() -> None:
    quick = dataclasses.replace(busy(0, samples=8, passes_s=0.016, waiting=0.048), peak_bytes=100)
    slow = dataclasses.replace(busy(1, samples=8, passes_s=0.064), peak_bytes=100)
    advice = only(advise_on(evidence(quick, slow, memory_bytes=125)))
    assert advice.change == {"batch.shares": (10 / 16, 6 / 16)}


def pipeline(size: int, *, idle_s: float, schedule: str = "1f1b") -> Evidence:
    """4 stages that take 80 ms for 32 samples."""
    plan = Plan(mesh=Mesh(pipeline=4), batch=Batch(micro_batch=size), schedule=schedule)
    stages = [busy(rank, samples=32, passes_s=0.08, bubble=idle_s) for rank in range(4)]
    return evidence(*stages, plan=plan, batch_size=32)


def test_a_bubble_shrinks_with_the_micro_batches_and_handing_on_does_not() -> None:
    free = only(advise_on(pipeline(8, idle_s=0.060)))
    assert free.change == {"batch.micro_batch": 1}
    assert free.predicted_gain == pytest.approx(140 / 87.5)
    costly = only(advise_on(pipeline(8, idle_s=0.064)))
    assert costly.change == {"batch.micro_batch": 2}  # 80 + 15 + 16 ms; with 1 sample 80 + 7.5 + 32
    assert costly.predicted_gain == pytest.approx(144 / 111)


def test_micro_batches_of_one_sample_leave_the_schedule() -> None:
    advice = only(advise_on(pipeline(1, idle_s=0.03)))
    assert advice.change == {"schedule": "zero-bubble"}
    assert advise_on(pipeline(1, idle_s=0.03, schedule="zero-bubble")) == []


def test_a_pipeline_that_computes_nothing_has_no_bubble_that_micro_batches_could_shrink() -> None:
    plan = Plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=2))
    assert advise_on(evidence(busy(0, bubble=0.1), busy(1, bubble=0.1), plan=plan, batch_size=16)) == []


def stalled(*, every: int, stall_s: float, write_s: float = 0.4) -> Evidence:
    saves = tuple(Saved(step, stall_s, write_s, 5e6) for step in range(every, 101, every))
    worker = busy(passes_s=0.02, checkpoint=stall_s / every)
    return evidence(worker, plan=Plan(checkpoint=Checkpoints(every_steps=every)), saves=saves)


def test_checkpoints_that_stall_are_written_less_often() -> None:
    advice = only(advise_on(stalled(every=1, stall_s=0.38)))
    assert advice.change == {"checkpoint.every_steps": 50}  # 1.5 * 400 ms / 20 ms is 30
    assert advice.predicted_gain == pytest.approx(400 / 20.1)
    assert "one in 50 steps instead of one in each step is predicted to bring 20x." in advice.sentence


def test_a_step_that_is_nothing_but_a_checkpoint_tells_nothing_of_those_without() -> None:
    run = evidence(
        busy(passes_s=0.0, checkpoint=0.4), saves=(Saved(step=1, bytes=0, stall_s=0.4, write_s=0.4, error=""),)
    )
    assert advise_on(dataclasses.replace(run, steps=1)) == []


def test_checkpoints_that_failed_or_hardly_stall_need_no_advice() -> None:
    assert advise_on(stalled(every=100, stall_s=0.1)) == []
    run = stalled(every=1, stall_s=0.38)
    failed = tuple(dataclasses.replace(save, error="the disk is full") for save in run.saves)
    assert advise_on(dataclasses.replace(run, saves=failed)) == []


def test_the_best_gain_comes_first() -> None:
    worker = busy(passes_s=0.03, data=0.02, checkpoint=0.05)
    saves = tuple(Saved(step, 0.05, 0.05, 1e5) for step in range(1, 101))
    found = advise_on(evidence(worker, loading=loading(fill_s=20.0), saves=saves))
    assert [advice.bottleneck for advice in found] == ["checkpoint", "data"]
    assert found[0].predicted_gain > found[1].predicted_gain >= 1.05


def test_what_would_bring_little_is_not_said() -> None:
    quick = busy(0, samples=8, passes_s=0.056, waiting=0.008)
    assert advise_on(evidence(quick, busy(1, samples=8, passes_s=0.064))) == []  # 9 and 7 samples: 63 ms instead of 64


def test_a_change_that_no_plan_can_have_is_not_advised() -> None:
    workers = [busy(0, samples=1, passes_s=0.001, waiting=0.063), busy(1, samples=1, passes_s=0.064)]
    assert advise_on(evidence(*workers)) == []  # each needs one of the two samples


def test_following_sets_the_fields_and_forgets_the_prediction() -> None:
    plan = Plan(mesh=Mesh(replicate=2), predicted=predicted(fixed_s=1, sample_s=1))
    new = follow(plan, {"batch.micro_batch": 4, "batch.shares": (0.75, 0.25), "sync.codec": "int8", "timeout_s": 5.0})
    assert (new.batch.micro_batch, new.batch.shares, new.sync.codec, new.timeout_s) == (4, (0.75, 0.25), "int8", 5.0)
    assert new.predicted is None
    with pytest.raises(PlanError):
        follow(plan, {"batch.shares": (1.0,)})


@pytest.mark.parametrize("loaders", ["threads", "workers"])
def test_every_field_that_advice_changes_has_a_flag_that_shoal_train_reads(loaders: str) -> None:
    change: dict[str, object] = {
        f"loading.{loaders}": 3,
        "sync.codec": "int8",
        "batch.shares": (0.75, 0.25),
        "batch.micro_batch": 4,
        "schedule": "zero-bubble",
        "checkpoint.every_steps": 50,
    }
    assert {*change, "loading.threads", "loading.workers"} == set(FLAGS)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    mesh = ["--mesh", "pipeline=2,replicate=2"]
    arguments = parser.parse_args(["train.py", *flags_of(change).split(), *mesh])
    plan = read_sync(arguments, read_checkpoints(arguments, read_plan(arguments)))
    assert plan == follow(Plan(mesh=Mesh(pipeline=2, replicate=2)), change)


def test_a_run_folder_is_advised_on_as_its_events_say(run: RunFolder) -> None:
    advice = only(advise(summarize(run)))
    assert advice.bottleneck == "straggler"
    assert advice.change is not None
    assert follow(Plan(mesh=Mesh(replicate=2)), advice.change).batch.shares == (0.375, 0.625)


def test_a_micro_batch_on_a_gpu_whose_memory_nobody_knows_stays_as_it_is(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path, workers=1)
    cost = predicted(fixed_s=0.015, sample_s=0.0)
    write_toml(run.plan_toml, Plan(batch=Batch(micro_batch=1), predicted=dataclasses.replace(cost, sample_s=1e-4)))
    assert [advice.bottleneck for advice in advise(summarize(run))] == ["micro-batch"]
    node = Node(host="tide-3", cores=8, memory_bytes=32_000_000_000, device="a GPU", devices=1)
    write_toml(run.cluster_toml, Cluster(nodes=(node,)))
    assert advise(summarize(run)) == []


def test_an_adviser_that_fails_is_left_out_and_said(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Evidence) -> None:
        raise ZeroDivisionError("float division by zero")

    monkeypatch.setitem(ADVISERS, "data", fail)
    summary = summarize(run)
    assert only(advise(summary)).bottleneck == "straggler"
    assert list(remarks(summary))[-1] == (
        "Whether data is a bottleneck could not be worked out, which is a mistake of shoal's "
        "(ZeroDivisionError: float division by zero)."
    )
    assert "Whether data is a bottleneck could not be worked out" in write_page(run).read_text()


def test_a_damaged_run_is_not_advised_on(tmp_path: Path, make_run: MakeRun) -> None:
    run = make_run(tmp_path)
    run.events_of(1).unlink()
    assert advise(summarize(run)) == []
    other = make_run(tmp_path, name="no-plan")
    other.plan_toml.unlink()
    assert advise(summarize(other)) == []

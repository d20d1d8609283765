"""The refined step time, held against the closed forms where these are exact, and against a whole simulation."""

import dataclasses

import pytest

from shoal.planner.calibration.megatron import gpt_profile
from shoal.planner.catalog import read_device, read_link
from shoal.planner.machine import Machine
from shoal.planner.time.refine import refine, timeline_of
from shoal.planner.time.steptime import step_time
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.sync import Sync

GPT = gpt_profile(width=2048, heads=16, layers=16, sequence=1024)
BLOCKS = dataclasses.replace(GPT, layers=GPT.layers[1:2])  # stages of a model of equal blocks are equal
BATCH = 64
A100 = Machine(
    device=read_device("a100-80"), nodes=4, per_node=8, inside=read_link("nvlink-3"), between=read_link("ib-hdr")
)


def plan(**fields: object) -> Plan:
    return Plan(**{"precision": "bf16", "batch": Batch(micro_batch=2), **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2), ("interleaved", 4)]
)
def test_the_simulated_bubble_of_equal_stages_is_that_of_the_closed_form(schedule: str, chunks: int) -> None:
    asked = plan(mesh=Mesh(pipeline=4), schedule=schedule, chunks=chunks)
    refined = refine(BLOCKS, asked, A100, batch_size=BATCH)
    closed = step_time(BLOCKS, asked, A100, batch_size=BATCH)
    # Zero-bubble's form is exact where forward and both halves of the backward are equally long, and nearly so here.
    assert refined.bubble_s == pytest.approx(closed.bubble_s, rel=0.03 if schedule == "zero-bubble" else 1e-6)


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("gpipe", 1), ("zero-bubble", 1), ("interleaved", 2)])
def test_simulating_a_few_micro_batches_gives_the_bubble_of_all(schedule: str, chunks: int) -> None:
    asked = plan(mesh=Mesh(pipeline=4, tensor=2), schedule=schedule, chunks=chunks)
    refined = refine(GPT, asked, A100, batch_size=BATCH)
    whole = timeline_of(GPT, asked, A100, batch_size=BATCH)
    passes_s = refined.compute_s + refined.tensor_s + refined.bubble_s + refined.pipeline_s
    assert passes_s == pytest.approx(whole.makespan_s, rel=0.01)


def test_a_heavy_head_makes_the_others_wait_less_where_the_cut_is_by_cost() -> None:
    asked = plan(mesh=Mesh(pipeline=4))
    by_count = timeline_of(dataclasses.replace(GPT, cut_by_count=True), asked, A100, batch_size=BATCH)
    assert by_count.bubble_s[3] == min(by_count.bubble_s), "the stage with the head has the most to do"
    by_cost = timeline_of(GPT, asked, A100, batch_size=BATCH)
    assert max(by_cost.bubble_s) < 0.8 * max(by_count.bubble_s)
    assert by_cost.makespan_s < 0.95 * by_count.makespan_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_what_shows_of_the_exchange_is_less_than_all_of_it(zero: int, pipeline: int) -> None:
    mesh = Mesh(shard=16, pipeline=pipeline) if zero else Mesh(replicate=16, pipeline=pipeline)
    asked = plan(mesh=mesh, zero=zero)
    refined = refine(GPT, asked, A100, batch_size=BATCH)
    everything_s = step_time(GPT, asked, A100, batch_size=BATCH, overlap=False).data_s
    if zero or pipeline == 1:
        assert 0 < refined.data_s < everything_s
    else:  # gradients are sent when the pipeline is done, and nothing is gathered beside a forward
        assert 0 < refined.data_s == pytest.approx(everything_s)


def test_all_stages_of_zero_are_alike_in_a_pipeline() -> None:
    times = [
        refine(GPT, plan(mesh=Mesh(shard=8, pipeline=2), zero=zero), A100, batch_size=BATCH).step_s
        for zero in (1, 2, 3)
    ]
    assert times[0] == times[1] == times[2]


def test_what_shows_is_near_the_closed_form_where_one_stage_has_all() -> None:
    for link in ("ib-hdr", "ethernet-10"):
        machine = dataclasses.replace(A100, between=read_link(link))
        asked = plan(mesh=Mesh(replicate=32))
        refined = refine(GPT, asked, machine, batch_size=BATCH)
        closed = step_time(GPT, asked, machine, batch_size=BATCH)
        # The closed form starts sending at once; the simulation when the first bucket is there.
        assert closed.step_s <= refined.step_s <= 1.1 * closed.step_s


def test_a_link_that_does_not_overlap_shows_everything() -> None:
    slow = dataclasses.replace(A100, between=dataclasses.replace(A100.between, overlaps=False))
    asked = plan(mesh=Mesh(replicate=32))
    closed = step_time(GPT, asked, slow, batch_size=BATCH)
    assert refine(GPT, asked, slow, batch_size=BATCH).step_s == pytest.approx(closed.step_s)


@pytest.mark.parametrize(
    "sync", [Sync(mode="server", servers=4), Sync(codec="int8"), Sync(mode="local", local_steps=4)]
)
def test_other_ways_to_synchronise_keep_their_closed_form(sync: Sync) -> None:
    asked = plan(mesh=Mesh(replicate=32), sync=sync)
    closed = step_time(GPT, asked, A100, batch_size=BATCH)
    assert refine(GPT, asked, A100, batch_size=BATCH).step_s == pytest.approx(closed.step_s)


def test_one_worker_waits_for_nobody() -> None:
    refined = refine(GPT, plan(), A100, batch_size=4)
    assert (refined.comm_s, refined.bubble_s) == (0.0, 0.0)
    assert refined.step_s == pytest.approx(step_time(GPT, plan(), A100, batch_size=4).step_s)

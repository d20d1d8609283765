"""Rankings: what is shown is what is written, the others' reasons are true, unequal devices share the batch."""

import dataclasses
import json
from typing import Any

import pytest

from shoal.core.errors import PlanError
from shoal.planner.calibration.calibration import Calibration, constants_of
from shoal.planner.calibration.megatron import gpt_profile
from shoal.planner.catalog import read_device, read_link
from shoal.planner.machine import Machine, machine_of
from shoal.planner.memory.peak import peak, peaks_of_stages
from shoal.planner.search.ranked import cost_plan
from shoal.planner.search.ranking import Ranking, check_plan, rank_plans
from shoal.planner.search.uneven import share_out
from shoal.planner.search.validate import axes
from shoal.planner.search.why import Timed, why_chosen
from shoal.planner.time.steptime import StepTime, step_time
from shoal.spec.cluster import Cluster, Node, Storage
from shoal.spec.plan import Batch, Mesh, Plan

GPT = gpt_profile(width=2048, heads=16, layers=24, sequence=1024)
BIG = gpt_profile(width=12288, heads=96, layers=96, sequence=2048)


def cluster(*devices: str, count: int = 2, link: str = "ib-hdr", per_node: int = 8) -> Cluster:
    nodes = [
        Node(host=f"n{number}", cores=8, memory_bytes=10**11, device=name, devices=per_node, count=count)
        for number, name in enumerate(devices)
    ]
    return Cluster(nodes=tuple(nodes), between=read_link(link), adapters=4)


def reasons(ranking: Ranking, start: str) -> list[str]:
    return [line for line in ranking.lost if line.startswith(start)]


@pytest.fixture(scope="module")
def big() -> Ranking:
    """175 billion parameters on 1,024 devices."""
    return rank_plans(BIG, cluster("a100-80", count=128), batch_size=1536)


def test_the_plans_are_in_order_and_each_has_its_prediction(big: Ranking) -> None:
    assert len(big.plans) == 5
    times_s = [ranked.time.step_s for ranked in big.plans]
    assert times_s == sorted(times_s)
    for ranked in big.plans:
        predicted = ranked.plan.predicted
        assert predicted is not None
        assert predicted.step_s == ranked.time.step_s
        assert predicted.samples_per_s == pytest.approx(1536 / ranked.time.step_s)
        assert predicted.peak_bytes == (ranked.peak.peak_bytes,), "of a thousand workers, the worst"
        assert ranked.needed_bytes <= (big.room_bytes or 0)


def test_a_step_is_the_sum_of_its_parts_and_recompute_is_a_part_of_computing(big: Ranking) -> None:
    for ranked in big.plans:
        time = ranked.time
        parts_s = time.compute_s + time.tensor_s + time.pipeline_s + time.data_s + time.bubble_s + time.optimizer_s
        assert time.step_s == pytest.approx(parts_s)
        assert (ranked.recompute_s > 0) == (ranked.plan.recompute != "none")
        assert ranked.recompute_s < time.compute_s


def test_the_obvious_others_lost_for_reasons_that_are_true(big: Ranking) -> None:
    assert reasons(big, "replicate=1024 does not fit: 3.")[0].endswith("TB needed, 85 GB there")
    crossing = reasons(big, "tensor=16 crosses nodes: ")
    assert len(crossing) == 1
    assert " of the step on 25 GB/s links (" in crossing[0]
    assert reasons(big, "pipeline=96: ")
    plan = big.plans[0].plan
    assert any(line.startswith("recompute=") for line in big.lost)
    assert not reasons(big, f"recompute={plan.recompute}"), "the winner itself has not lost"


def test_each_plan_keeps_why_it_stands_where_it_does(big: Ranking) -> None:
    first, second = big.plans[:2]
    sentence, *others = first.plan.why
    assert sentence.startswith(f"The fastest of {big.looked_at:,} plans that were looked at. The next, ")
    assert f" {axes(second.plan.mesh)}" in sentence
    assert f" would take {second.time.step_s / first.time.step_s:.2f}x as long: " in sentence
    assert others == [f"{line}." for line in big.lost]
    (place,) = second.plan.why
    assert place.startswith(f"Number 2 of {big.looked_at:,} plans that were looked at. It takes ")
    assert f"beside the fastest, {axes(first.plan.mesh)}" in place


def test_a_runner_up_is_named_by_what_it_does_otherwise() -> None:
    def timed(data_s: float, **fields: Any) -> Timed:
        sent: dict[str, Any] = {
            "inside_bytes": 0,
            "between_bytes": 0,
            "tensor_s": 0.0,
            "pipeline_s": 0.0,
            "bubble_s": 0.0,
        }
        return Timed(Plan(**fields), StepTime(compute_s=0.9, optimizer_s=0.0, data_s=data_s, **sent))

    mesh = Mesh(replicate=4)
    plans = [timed(0.1, mesh=mesh), timed(0.3, mesh=mesh, batch=Batch(micro_batch=2), recompute="full")]
    assert why_chosen(plans, 0, looked_at=7, lost=["pipeline=4: slow"]) == (
        "The fastest of 7 plans that were looked at. The next, replicate=4, micro_batch=2, recompute=full, would take "
        "1.20x as long: 200 ms more for gradients and parameters on their way.",
        "pipeline=4: slow.",
    )
    assert why_chosen(plans[:1], 0, looked_at=7, lost=[]) == ("The fastest of 7 plans that were looked at.",)


def test_plans_that_do_the_same_are_equal_whatever_they_say_of_why() -> None:
    assert Plan(why=("Given by --workers 1.",)) == Plan()


def test_the_ranking_can_be_written_as_json(big: Ranking) -> None:
    figures = json.loads(json.dumps(big.as_json(), allow_nan=False))
    assert figures["plans"][0]["time"]["step_s"] == big.plans[0].time.step_s
    assert figures["plans"][0]["plan"]["mesh"] == dataclasses.asdict(big.plans[0].plan.mesh)
    assert figures["plans"][0]["memory"]["needed_bytes"] == big.plans[0].needed_bytes
    assert figures["lost"] == list(big.lost)


def test_checkpoints_come_more_often_on_more_nodes_and_on_slower_storage() -> None:
    few, many = (rank_plans(GPT, cluster("a100-80", count=count), batch_size=512) for count in (1, 32))
    assert many.reliability.mtbf_s == pytest.approx(few.reliability.mtbf_s / 32)
    assert many.plans[0].plan.checkpoint_s == pytest.approx(many.reliability.interval_s, abs=1)
    slow = dataclasses.replace(cluster("a100-80", count=1), storage=(Storage(path="/", read_bytes_per_s=1e8),))
    assert rank_plans(GPT, slow, batch_size=512).reliability.stall_s == pytest.approx(10 * few.reliability.stall_s)


def test_the_error_bar_is_the_calibrations_where_there_is_one() -> None:
    there = cluster("a100-80", count=1)
    machine = machine_of(there)
    calibration = Calibration(
        device="NVIDIA A100", fitted_on=("a.csv",), rows=61, mean_abs_error=0.06, constants=constants_of(machine)
    )
    assert rank_plans(GPT, there, batch_size=64).error == 0.2
    assert rank_plans(GPT, there, batch_size=64, calibration=calibration).error == 0.06


def test_unequal_devices_take_parts_in_proportion_to_their_speed() -> None:
    ranking = rank_plans(GPT, cluster("h100", "a100-80"), batch_size=512)
    best = ranking.plans[0]
    shares = best.plan.batch.shares
    assert len(shares) == best.plan.mesh.data
    assert shares[0] > 1.5 * shares[-1], "an H100 is more than half as fast again as an A100"
    assert any(note.startswith("The devices differ: parts of ") for note in ranking.notes)
    slowest = rank_plans(GPT, cluster("a100-80", "a100-80"), batch_size=512).plans[0]
    assert best.time.step_s < slowest.time.step_s


def test_all_replicas_with_unequal_shares_are_done_within_a_sample_of_each_other() -> None:
    there = cluster("h100", "a100-80", count=1)
    machine = machine_of(there)
    plan = Plan(mesh=Mesh(replicate=16), batch=Batch(micro_batch=4), precision="bf16")
    out = share_out(plan, GPT, there, machine, batch_size=256)
    assert out is not None
    seconds = {}
    for name in ("h100", "a100-80"):
        there_machine = dataclasses.replace(machine, device=read_device(name))
        time = step_time(GPT, plan, there_machine, batch_size=256)
        seconds[name] = (time.compute_s + time.tensor_s) / 16  # of one of the 16 samples of an equal part
    ends = [part * seconds[name] for part, name in zip(out[1].parts, ["h100"] * 8 + ["a100-80"] * 8, strict=True)]
    assert max(ends) - min(ends) <= max(seconds.values())


def test_equal_devices_have_no_shares_to_give() -> None:
    there = cluster("a100-80")
    plan = Plan(mesh=Mesh(replicate=16), precision="bf16")
    assert share_out(plan, GPT, there, machine_of(there), batch_size=256) is None


def test_what_would_win_if_it_were_exact_is_said_but_not_proposed() -> None:
    slow = cluster("a100-80", count=8, link="ethernet-1", per_node=1)
    notes = rank_plans(GPT, slow, batch_size=64).notes
    assert any(note.startswith("Not exact, so not proposed: sync.") for note in notes)
    assert not any(note.startswith("Not exact") for note in rank_plans(GPT, slow, batch_size=64, lossy=True).notes)


def test_fewer_devices_than_there_are_is_said() -> None:
    notes = rank_plans(GPT, cluster("a100-80", count=4, link="ethernet-1"), batch_size=8).notes
    assert any(note.startswith("The best plan takes ") and "of 32 devices" in note for note in notes)


def test_a_model_that_fits_nowhere_is_refused_with_the_least_it_needs() -> None:
    with pytest.raises(PlanError, match=r"^no plan fits: a worker needs at least .* and has 16\.9 GB\. Use more"):
        rank_plans(BIG, cluster("v100-16", count=1), batch_size=8)


def test_a_checked_plan_has_the_figures_of_the_ranking(big: Ranking) -> None:
    there = cluster("a100-80", count=128)
    checked = check_plan(big.plans[0].plan, BIG, there, batch_size=1536, num_samples=10**6)
    assert checked.plans[0].time.step_s == pytest.approx(big.plans[0].time.step_s)
    with pytest.raises(PlanError, match="tensor=5 does not divide"):
        check_plan(Plan(mesh=Mesh(tensor=5), precision="bf16"), BIG, there, batch_size=1536, num_samples=10**6)


def test_each_worker_has_the_peak_of_its_own_stage_and_part() -> None:
    there = machine_of(cluster("a100-80", count=1))
    pipeline = Plan(mesh=Mesh(pipeline=2, replicate=2, tensor=2), batch=Batch(micro_batch=4), precision="bf16")
    predicted = cost_plan(pipeline, GPT, there, batch_size=32).plan.predicted
    assert predicted is not None
    stages = [each.peak_bytes for each in peaks_of_stages(GPT, pipeline, samples=16, device=there.device)]
    assert stages[0] != stages[1]
    assert predicted.peak_bytes == (stages[0],) * 4 + (stages[1],) * 4
    uneven = Plan(mesh=Mesh(replicate=2, tensor=2), batch=Batch(shares=(0.75, 0.25)), precision="bf16")
    predicted = cost_plan(uneven, GPT, there, batch_size=32).plan.predicted
    assert predicted is not None
    parts = [peak(GPT, uneven, samples=part, device=there.device).peak_bytes for part in (24, 8)]
    assert predicted.peak_bytes == (parts[0], parts[0], parts[1], parts[1])


def test_the_machine_of_a_ranking_is_that_of_its_cluster(big: Ranking) -> None:
    assert isinstance(big.machine, Machine)
    assert big.machine.workers == 1024

"""The settings that advice changes do what they say: loader threads, and what a micro-batch is predicted to take."""

import dataclasses
import threading
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import PlanError
from shoal.data.steps import StepLoader
from shoal.planner.machine import Machine, machine_of
from shoal.planner.search.ranked import cost_plan, micro_batch_times
from shoal.profile.trace import trace
from shoal.spec.cluster import Cluster, Node
from shoal.spec.device import Device
from shoal.spec.plan import Batch, Loading, Plan
from shoal.training.host import this_host
from shoal.training.jobfile import load_job
from shoal.training.predict import predict_plan

JOB = Path(__file__).with_name("jobs") / "tiny_computed.py"


class Together:
    """A dataset that gives samples only to as many threads at once as it is told."""

    def __init__(self, threads: int) -> None:
        self._barrier = threading.Barrier(threads, timeout=20)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        self._barrier.wait()
        return index


def parts(data: Any, *, threads: int | None, ahead: bool = True) -> list[tuple[int, ...]]:
    loader = StepLoader(
        data, batch_size=4, shares=(1.0,), index=0, last_step=8, threads=threads, is_ahead=ahead, timeout_s=30
    )
    found = []
    for part in loader:
        assert part.batch.tolist() == list(part.samples)
        found.append(part.samples)
    return found


def test_several_threads_load_a_dataset_at_once_and_in_the_same_order() -> None:
    assert parts(Together(4), threads=4) == parts(Together(1), threads=None)


def test_a_plan_has_no_fewer_threads_than_none() -> None:
    assert Plan().loading.threads == 0
    with pytest.raises(PlanError, match="from 1 to 256 threads"):
        Loading(threads=-1)


def told_machine() -> tuple[Cluster, Machine]:
    """Return this host with a device of round numbers."""
    device = Device(
        source="told",
        matmul_flops_per_s=1e11,
        bf16_matmul_flops_per_s=1e11,
        memory_bytes_per_s=1e10,
        operation_s=1e-4,
    )
    node: Node = this_host().nodes[0]
    cluster = Cluster(nodes=(node,), devices={node.device: device})
    return cluster, machine_of(cluster, per_node=1)


def test_what_micro_batches_take_adds_up_to_what_a_step_computes() -> None:
    job, (_, machine) = load_job(JOB), told_machine()
    plan = Plan(batch=Batch(micro_batch=4))
    profile = trace(job, micro_batch=4, precision="fp32", gpu=False)
    fixed_s, sample_s = micro_batch_times(plan, profile, machine, batch_size=32)
    compute_s = cost_plan(plan, profile, machine, batch_size=32).time.compute_s
    assert 8 * fixed_s + 32 * sample_s == pytest.approx(compute_s, rel=0.01)
    passes = profile.operations - profile.optimizer_operations
    assert fixed_s == pytest.approx(passes * 1e-4, rel=0.2)  # the starts, and adding up gradients


def test_a_second_trace_tells_what_weights_cost_from_what_samples_cost() -> None:
    job, (cluster, machine) = load_job(JOB), told_machine()
    plan = Plan(batch=Batch(micro_batch=1))
    profile = trace(job, micro_batch=1, precision="fp32", gpu=False)
    alone = micro_batch_times(plan, profile, machine, batch_size=32)
    predicted = predict_plan(job, plan, profile, cluster=cluster, say=pytest.fail)
    assert predicted is not None
    assert predicted.fixed_s > alone[0]
    assert predicted.sample_s < alone[1]
    whole = trace(job, micro_batch=32, precision="fp32", gpu=False)
    at_once = cost_plan(dataclasses.replace(plan, batch=Batch()), whole, machine, batch_size=32).time.compute_s
    assert predicted.fixed_s + 32 * predicted.sample_s == pytest.approx(at_once, rel=0.01)


def test_a_single_sample_is_all_its_own() -> None:
    job, (_, machine) = load_job(JOB), told_machine()
    profile = trace(job, micro_batch=1, precision="fp32", gpu=False)
    fixed_s, sample_s = micro_batch_times(Plan(), profile, machine, batch_size=1)
    assert fixed_s == 0
    assert sample_s > 0

"""What a plan is predicted to cost on this machine: the job is traced, the machine measured, the rest is arithmetic."""

from collections.abc import Callable
from typing import TypeAlias

import torch

from shoal.core.errors import ShoalError
from shoal.data.partition import parts
from shoal.planner.catalog import read_link
from shoal.planner.predict import predict
from shoal.profile.host import measure_host
from shoal.profile.trace import trace
from shoal.spec.job import Job
from shoal.spec.plan import Plan, Predicted

Say: TypeAlias = Callable[[str], object]
"""Tells the user one line."""


def predict_plan(job: Job, plan: Plan, *, say: Say) -> Predicted | None:
    """Return what `plan` is predicted to cost on this host, or None, saying why, where that cannot be known."""
    if torch.cuda.is_available():
        say("No prediction: so far only CPU workers are predicted.")
        return None
    samples = parts(min(job.batch_size, len(job.data)), plan.shares)
    at_once = min(max(samples), plan.batch.micro_batch or max(samples))
    try:
        profile = trace(job, micro_batch=at_once, precision=plan.precision)
    except ShoalError as error:
        say(f"No prediction: {error}")
        return None
    host, link = measure_host(), read_link("loopback")
    return predict(
        profile,
        parts=samples,
        micro_batch=plan.batch.micro_batch,
        matmul_flops_per_s=host.bf16_matmul_flops_per_s if plan.precision == "bf16" else host.matmul_flops_per_s,
        memory_bytes_per_s=host.memory_bytes_per_s,
        operation_s=host.operation_s,
        link_bytes_per_s=link.bytes_per_s,
        link_latency_s=link.latency_s,
        link_overlaps=link.overlaps,
    )

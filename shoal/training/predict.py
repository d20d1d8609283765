"""What a plan is predicted to cost on this machine: the model traced, the machine measured, the rest arithmetic."""

import dataclasses

from shoal.core.errors import ShoalError
from shoal.planner.machine import Machine, machine_of
from shoal.planner.search.ranked import cost_plan, micro_batch_times
from shoal.planner.time.steptime import largest_part
from shoal.profile.trace import trace
from shoal.spec.cluster import Cluster
from shoal.spec.job import Job
from shoal.spec.plan import Plan, Predicted
from shoal.spec.profile import Profile
from shoal.training.host import Say


def predict_plan(job: Job, plan: Plan, profile: Profile | None, *, cluster: Cluster, say: Say) -> Predicted | None:
    """Return what `plan` is predicted to cost on the nodes of `cluster`, or None, saying why, where nobody knows.

    `profile` is what the model costs; None: it could not be traced, which has been said.
    """
    if plan.engine != "torch":
        say("No prediction: the planner knows torch's engines, and this plan runs on DeepSpeed.")
        return None
    gpus = cluster.nodes[0].devices
    per_node = -(-plan.workers // sum(node.count for node in cluster.nodes))
    if 0 < gpus < per_node:
        say(f"No prediction: {per_node} workers share {gpus} GPU{'s' * (gpus > 1)}.")
        return None
    if profile is None:
        return None
    try:
        machine = machine_of(cluster, per_node=per_node)
        batch_size = job.largest_batch
        predicted = cost_plan(plan, profile, machine, batch_size=batch_size).plan.predicted
        return _with_micro_batches(predicted, job, plan, profile, machine, batch_size=batch_size)
    except ShoalError as error:
        say(f"No prediction: {error}")
        return None


def _with_micro_batches(
    predicted: Predicted | None, job: Job, plan: Plan, profile: Profile, machine: Machine, *, batch_size: int
) -> Predicted | None:
    """Return `predicted` with what micro-batches take, where there are several: known better from a second trace."""
    samples = largest_part(plan, batch_size)
    if predicted is None or plan.at_once(batch_size) >= samples:
        return predicted
    whole = trace(job, micro_batch=samples, precision=plan.precision, gpu=not machine.shared)
    fixed_s, sample_s = micro_batch_times(plan, profile, machine, batch_size=batch_size, whole=whole)
    return dataclasses.replace(predicted, fixed_s=fixed_s, sample_s=sample_s)

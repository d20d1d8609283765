"""What a plan is predicted to cost on this machine: the job is traced, the machine measured, the rest is arithmetic."""

from shoal.core.errors import ShoalError
from shoal.planner.machine import machine_of
from shoal.planner.search.ranked import cost_plan
from shoal.planner.time.steptime import largest_part
from shoal.profile.trace import trace
from shoal.spec.cluster import Cluster
from shoal.spec.job import Job
from shoal.spec.plan import Plan, Predicted
from shoal.training.host import Say


def predict_plan(job: Job, plan: Plan, *, cluster: Cluster, say: Say) -> Predicted | None:
    """Return what `plan` is predicted to cost on the one host of `cluster`, or None, saying why, where nobody knows."""
    gpus = cluster.nodes[0].devices
    if 0 < gpus < plan.workers:
        say(f"No prediction: {plan.workers} workers share {gpus} GPU{'s' * (gpus > 1)}.")
        return None
    batch_size = min(job.batch_size, len(job.data))
    samples = largest_part(plan, batch_size)
    at_once = min(samples, plan.batch.micro_batch or samples)
    try:
        profile = trace(job, micro_batch=at_once, precision=plan.precision, gpu=gpus > 0)
        machine = machine_of(cluster, per_node=plan.workers)
        return cost_plan(plan, profile, machine, batch_size=batch_size).plan.predicted
    except ShoalError as error:
        say(f"No prediction: {error}")
        return None

"""What a plan is predicted to cost on this machine: the model traced, the machine measured, the rest arithmetic."""

from shoal.core.errors import ShoalError
from shoal.planner.machine import machine_of
from shoal.planner.search.ranked import cost_plan
from shoal.spec.cluster import Cluster
from shoal.spec.job import Job
from shoal.spec.plan import Plan, Predicted
from shoal.spec.profile import Profile
from shoal.training.host import Say


def predict_plan(job: Job, plan: Plan, profile: Profile | None, *, cluster: Cluster, say: Say) -> Predicted | None:
    """Return what `plan` is predicted to cost on the nodes of `cluster`, or None, saying why, where nobody knows.

    `profile` is what the model costs; None: it could not be traced, which has been said.
    """
    gpus = cluster.nodes[0].devices
    per_node = -(-plan.workers // sum(node.count for node in cluster.nodes))
    if 0 < gpus < per_node:
        say(f"No prediction: {per_node} workers share {gpus} GPU{'s' * (gpus > 1)}.")
        return None
    if profile is None:
        return None
    try:
        machine = machine_of(cluster, per_node=per_node)
        batch_size = min(job.batch_size, len(job.data))
        return cost_plan(plan, profile, machine, batch_size=batch_size).plan.predicted
    except ShoalError as error:
        say(f"No prediction: {error}")
        return None

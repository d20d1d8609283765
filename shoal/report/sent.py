"""What a worker sent in a step, by the collectives that its log has counted; the planner predicts the same.

A log knows the bytes of each call, as its caller sees them, and not who joined in it. The mesh tells that where it has
one kind of group for each operation. Of p workers, each sends of n bytes

    all-reduce                    2 (p-1)/p n, whatever the algorithm (planner/collectives)
    all-gather, reduce-scatter      (p-1)/p n, where n is the whole

Example: ZeRO-3 of 100 MB over 4 workers gathers them twice and scatters gradients once: 3/4 of 300 MB are 225 MB.
"""

from shoal.report.logs.facts import Call
from shoal.report.summary import Summary
from shoal.spec.plan import Plan

INSIDE, BETWEEN = "inside", "between"
_PASSES = {"all-reduce": 2, "all-gather": 1, "reduce-scatter": 1}
"""How often each byte travels, of those that are not the worker's own."""


def sent_bytes(summary: Summary, where: str) -> float | None:
    """Return what a worker sends in a step `INSIDE` its node or `BETWEEN` nodes; None where the logs do not tell."""
    plan, calls = summary.plan, summary.calls
    if plan is None or not calls or not summary.calls_steps or not _is_counted(plan):
        return None
    places = {_place_of(call, summary) for call in calls}
    factors = [_factor(call.op, plan) for call in calls]
    if len(places) != 1 or None in places or None in factors:
        return None
    if places != {where}:
        return 0.0
    sent = sum((factor or 0.0) * call.bytes * call.count for factor, call in zip(factors, calls, strict=True))
    return sent / summary.calls_steps


def _is_counted(plan: Plan) -> bool:
    """Return whether all that is sent is in the log: not what stages pass on, nor what servers are sent."""
    return plan.mesh.pipeline == 1 and plan.sync.mode == "all-reduce" and plan.engine == "torch"


def _place_of(call: Call, summary: Summary) -> str | None:
    """Return whether the call stays inside a node; None where some of it does."""
    if call.link in ("shm", "host"):
        return INSIDE
    nodes = sum(node.count for node in summary.cluster.nodes) if summary.cluster else 0
    if call.link == "gpu" and nodes == 1:
        return INSIDE
    return BETWEEN if nodes >= summary.workers else None


def _factor(op: str, plan: Plan) -> float | None:
    """Return how many times its bytes a call sends; None where nobody knows who joins in it, or of what."""
    mesh = plan.mesh
    is_coded = plan.sync.codec != "none" and op != "all-reduce"  # some codecs gather parts, others exchange them
    if op not in _PASSES or is_coded or (mesh.tensor > 1 and mesh.data > 1):
        return None
    if mesh.tensor > 1:
        workers = mesh.tensor
    elif op == "all-reduce":
        workers = mesh.replicate if mesh.replicate > 1 else mesh.data
    else:
        workers = mesh.shard
    return _PASSES[op] * (workers - 1) / workers

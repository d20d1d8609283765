"""What collectives were predicted to take, by the links that the run measured before its first step."""

from shoal.planner.collectives.crowd import STEPS, crowded
from shoal.report.logs.facts import Call
from shoal.report.summary import Summary
from shoal.spec.device import Link


def predicted_call_s(summary: Summary, call: Call) -> float | None:
    """Return how long one such call was to take; None where no measured link or no closed form tells it."""
    link = _link_of(summary, call)
    workers = summary.plan.mesh.data if summary.plan else summary.workers
    if link is None or call.op != "all-reduce" or call.algorithm not in STEPS or workers < 2:
        return None
    return crowded(call.algorithm, call.bytes, workers, link).seconds


def _link_of(summary: Summary, call: Call) -> Link | None:
    measured = summary.communication
    if measured is None:
        return None
    return {"network": measured.between, "host": measured.inside or measured.between}.get(call.link)

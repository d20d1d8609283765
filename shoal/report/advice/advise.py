"""All bottlenecks of a run, the best cure first."""

from collections.abc import Callable

from shoal.core.errors import PlanError
from shoal.planner.search.validate import check_batch, check_sync
from shoal.report.advice.advice import Advice
from shoal.report.advice.bubble import on_bubble
from shoal.report.advice.checkpoint import on_checkpoints
from shoal.report.advice.data import on_data
from shoal.report.advice.evidence import Evidence, evidence_of
from shoal.report.advice.follow import follow
from shoal.report.advice.link import on_link
from shoal.report.advice.micro_batch import on_micro_batch
from shoal.report.advice.straggler import on_straggler
from shoal.report.summary import Summary

WORTH = 1.05
"""What is predicted to bring less is not said: two runs of the same plan differ by as much."""
ADVISERS: dict[str, Callable[[Evidence], Advice | None]] = {
    "data": on_data,
    "link": on_link,
    "straggler": on_straggler,
    "micro-batch": on_micro_batch,
    "bubble": on_bubble,
    "checkpoint": on_checkpoints,
}
"""Who looks for each bottleneck."""


def advise(summary: Summary) -> list[Advice]:
    """Return what to change, the best first; empty where nothing is worth it, or too little is known."""
    run = evidence_of(summary)
    return [] if run is None else advise_on(run)


def advise_on(run: Evidence) -> list[Advice]:
    """Return the same from what there is to go by; who fails over it is left out (`failed_advisers`)."""
    found = [advice for advice in _asked(run).values() if isinstance(advice, Advice)]
    worth = [advice for advice in found if advice.predicted_gain >= WORTH and _can_run(advice, run)]
    return sorted(worth, key=lambda advice: advice.predicted_gain, reverse=True)


def failed_advisers(summary: Summary) -> list[str]:
    """Return a sentence for each bottleneck that could not be looked for: a report never fails on a run's folder."""
    run = evidence_of(summary)
    failed = {} if run is None else {name: error for name, error in _asked(run).items() if isinstance(error, Exception)}
    return [
        f"Whether {name} is a bottleneck could not be worked out, which is a mistake of shoal's "
        f"({type(error).__name__}: {error})."
        for name, error in failed.items()
    ]


def _asked(run: Evidence) -> dict[str, Advice | Exception | None]:
    """Return what each adviser says of the run, or what it failed with."""
    return {name: _asked_one(adviser, run) for name, adviser in ADVISERS.items()}


def _asked_one(adviser: Callable[[Evidence], Advice | None], run: Evidence) -> Advice | Exception | None:
    try:
        return adviser(run)
    except Exception as error:  # whatever it is, the rest of the report stands
        return error


def _can_run(advice: Advice, run: Evidence) -> bool:
    """Return whether the plan with the change can be run, as far as that is known without the model."""
    if advice.change is None:
        return True
    try:
        plan = follow(run.plan, advice.change)
        check_batch(plan, run.batch_size)
        check_sync(plan)
    except PlanError:
        return False
    return True

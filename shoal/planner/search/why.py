"""Why a plan is the one: how it stands among those that were looked at, and why the obvious others lost."""

from collections.abc import Sequence
from typing import NamedTuple

from shoal.core.units import format_seconds
from shoal.planner.search.validate import axes
from shoal.planner.time.steptime import StepTime
from shoal.spec.plan import Plan

_PARTS = {
    "compute_s": "computing",
    "tensor_s": "messages inside layers",
    "pipeline_s": "messages between stages",
    "data_s": "gradients and parameters on their way",
    "bubble_s": "bubble",
    "optimizer_s": "the optimizer",
}


class Timed(NamedTuple):
    """A plan and what its step takes by arithmetic, which is what plans are ranked by."""

    plan: Plan
    time: StepTime


def why_chosen(plans: Sequence[Timed], place: int, *, looked_at: int, lost: Sequence[str]) -> tuple[str, ...]:
    """Return the sentences that the plan at `place` of a ranking keeps; `lost`: why others lost to the first.

    Example: "The fastest of 1,028 plans that were looked at. The next, pipeline=2 x shard=64, schedule=interleaved,
    would take 1.06x as long: 407 ms more for messages between stages."
    """
    mine, first = plans[place], plans[0]
    if place:
        best = _words(first.plan, beside=mine.plan)
        return (
            f"Number {place + 1} of {looked_at:,} plans that were looked at. It takes {_slower(mine, first)}, beside "
            f"the fastest, {best}.",
        )
    sentence = f"The fastest of {looked_at:,} plans that were looked at."
    if len(plans) > 1:
        following = _words(plans[1].plan, beside=mine.plan)
        sentence += f" The next, {following}, would take {_slower(plans[1], mine)}."
    return (sentence, *(f"{line}." for line in lost))


def _words(plan: Plan, *, beside: Plan) -> str:
    """Return the plan's mesh, and what else is other than in the plan that it stands beside."""
    mine, other = _settings(plan), _settings(beside)
    return ", ".join([axes(plan.mesh), *(f"{name}={value}" for name, value in mine.items() if value != other[name])])


def _settings(plan: Plan) -> dict[str, object]:
    return {
        "zero": plan.zero,
        "micro_batch": plan.batch.micro_batch or "whole",
        "recompute": plan.recompute,
        "schedule": plan.schedule,
        "sync.mode": plan.sync.mode,
        "sync.codec": plan.sync.codec,
    }


def _slower(slow: Timed, fast: Timed) -> str:
    """Return '1.06x as long: 407 ms more for messages between stages'."""
    grown = {name: getattr(slow.time, name) - getattr(fast.time, name) for name in _PARTS}
    most = max(grown, key=lambda name: grown[name])
    more = f": {format_seconds(grown[most])} more for {_PARTS[most]}" if grown[most] > 0 else ""
    return f"{slow.time.step_s / fast.time.step_s:.2f}x as long{more}"

"""What the time of a step went to, in the words of the live view, the report and the advice.

A worker's log knows how long it waited for communication, not for what. The others' logs know the rest: whoever was
busy shorter than the slowest worker of the step spent the difference waiting for that one, and only what is left of its
wait was the network's.

Example: two workers with 300 and 400 ms of work in a step, and waits of 130 and 30 ms. The first waited 100 ms for the
second, and both 30 ms for the network.
"""

from collections.abc import Sequence

from shoal.core.events import STEP_PARTS
from shoal.report.logs.log import Step

PARTS = ("data", "compute", "communication", "bubble", "checkpoint", "waiting", "other")
"""Waiting is for other workers; communication what the links cost on top; checkpoint what a save held the loop up."""

_COMPUTE = ("forward_s", "backward_s", "optimizer_s")


def split_step(workers: Sequence[Step]) -> list[dict[str, float]]:
    """Return the seconds of each of `PARTS` for each worker of one step; they add up to the worker's step."""
    seconds = [dict(zip(STEP_PARTS, step.parts_s, strict=True)) for step in workers]
    busy = [step.total_s - parts["comm_s"] - parts["bubble_s"] for step, parts in zip(workers, seconds, strict=True)]
    longest_s = max(busy, default=0.0)
    split = []
    for step, parts, busy_s in zip(workers, seconds, busy, strict=True):
        waiting_s = min(longest_s - busy_s, parts["comm_s"])
        known = {
            "data": parts["data_s"],
            "compute": sum(parts[name] for name in _COMPUTE),
            "communication": parts["comm_s"] - waiting_s,
            "bubble": parts["bubble_s"],
            "checkpoint": parts["checkpoint_s"],
            "waiting": waiting_s,
        }
        split.append(known | {"other": max(0.0, step.total_s - sum(known.values()))})
    return split

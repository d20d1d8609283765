"""How often to write a checkpoint, and what failures cost.

A checkpoint every t seconds of work stalls training for C seconds; a failure, on average every M seconds, loses what
was done since the last one, and the restart takes R seconds more. Often: many stalls. Seldom: much is lost.

    Young (1974):  t = sqrt(2 C M)
    Daly (2006):   t = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C   for C < 2 M, otherwise t = M
                   (https://doi.org/10.1016/j.future.2004.11.016)

With failures that come at random (exponentially, as Daly assumes), t seconds of work and their checkpoint take
M exp(R / M) (exp((t + C) / M) - 1) seconds on average, failures in the restart included: that gives the lost part.

Example: 128 nodes that fail every 264 days each: M = 2.1 days. C = 60 s: t = 76 min, and 2.7% of the time is lost.
"""

import math
from dataclasses import dataclass

NODE_MTBF_S = 264 * 24 * 3600.0
"""Mean time between failures of one node with eight GPUs: 16,384 H100 (2,048 nodes) stopped 419 times unexpectedly in
54 days, so 2,048 * 54 / 419 node-days (The Llama 3 Herd of Models, 2024, section 3.3.4)."""

RESTART_S = 300.0
"""Seconds until a failed run trains again: notice, requeue, load. An assumption, to be measured by the run itself."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """When to write checkpoints, and what that and the failures cost."""

    mtbf_s: float
    """Mean seconds between two failures of the whole run."""
    stall_s: float
    """Seconds that training stands still for one checkpoint."""
    interval_s: float
    """Seconds of work between two checkpoints."""
    lost_fraction: float
    """The part of the time that goes into checkpoints, restarts and work done twice."""


def plan_checkpoints(
    *, nodes: int, stall_s: float, node_mtbf_s: float = NODE_MTBF_S, restart_s: float = RESTART_S
) -> Reliability:
    """Return how often a run on `nodes` writes a checkpoint that stalls it for `stall_s`, and what is lost so."""
    mtbf_s = node_mtbf_s / nodes  # any node's failure stops the run
    interval_s = daly_s(stall_s, mtbf_s)
    lost = lost_fraction(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s)
    return Reliability(mtbf_s=mtbf_s, stall_s=stall_s, interval_s=interval_s, lost_fraction=lost)


def young_s(stall_s: float, mtbf_s: float) -> float:
    """Return Young's seconds of work between two checkpoints."""
    return math.sqrt(2 * stall_s * mtbf_s)


def daly_s(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's seconds of work between two checkpoints: Young's, corrected where a stall is not short."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = stall_s / (2 * mtbf_s)
    return young_s(stall_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - stall_s


def lost_fraction(interval_s: float, *, stall_s: float, mtbf_s: float, restart_s: float = 0.0) -> float:
    """Return the part of the time that is not lasting work, with a checkpoint every `interval_s` of work."""
    exponent = (interval_s + stall_s) / mtbf_s
    if exponent > 600:  # exp would overflow: such a run never gets from one checkpoint to the next
        return 1.0
    expected_s = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent)
    return 1 - interval_s / expected_s

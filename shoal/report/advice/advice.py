"""Advice: a bottleneck, what to change, and what that is predicted to bring."""

from dataclasses import dataclass

NOTICED = 0.10
"""Below a tenth of a step, a bottleneck is not looked at."""


@dataclass(frozen=True)
class Advice:
    """One bottleneck of a run, and its cure."""

    bottleneck: str
    """data, link, straggler, micro-batch, bubble or checkpoint."""
    share: float
    """The fraction of each step that goes there."""
    sentence: str
    change: dict[str, object] | None
    """The fields of the plan to change, by name: {"batch.micro_batch": 8}. None: nothing of the plan would help."""
    predicted_gain: float
    """The new throughput over the old."""
    is_bound: bool = False
    """Whether that is only what it brings at least: too little is known to say more."""


def percent(fraction: float) -> str:
    """Return '7%', or 'under 1%' for the little that would round to nothing."""
    return "under 1%" if 0 < fraction < 0.005 else f"{fraction:.0%}"


def times(gain: float) -> str:
    """Return '1.6x' or '12x'."""
    return f"{gain:.2g}x" if gain < 10 else f"{gain:.0f}x"


def milliseconds(seconds: float) -> str:
    """Return '8.1 ms' or '2.3 s'."""
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"

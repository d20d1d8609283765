"""How many local steps a link asks for, until workers meet: as few as keep it from costing much.

1. A meeting is an all-reduce of the parameters, n bytes by p workers, after the codec: by the ring,
   t = 2 (p - 1) / p * n / beta + 2 (p - 1) alpha, and nothing is computed beside it.
2. With a step that computes for c seconds, H steps and a meeting take H c + t. The meeting's share of that is to be at
   most s: t / (H c + t) <= s, so H >= t (1 - s) / (s c).
3. More local steps train worse: H is the least that does it, and at most `MOST_STEPS`.

Example: 45 MB of parameters, 4 workers at 100 Mb/s (12.5 MB/s) and 0.1 ms, steps of 0.5 s: t = 1.5 * 45 / 12.5 = 5.4 s.
With s = 5%, H = 5.4 * 0.95 / (0.05 * 0.5) = 205.2: 206 local steps, and 5% of the time is spent at meetings.
"""

import math
from dataclasses import dataclass

from shoal.planner.collectives.allreduce import ring
from shoal.spec.device import Link

SHARE = 0.05
"""How much of the time meetings may take."""
MOST_STEPS = 500
"""DiLoCo's setting (Douillard et al. 2023, arXiv 2311.08105); more than that has not been tried here."""


@dataclass(frozen=True, kw_only=True)
class LocalSteps:
    """How many, and what they cost."""

    steps: int
    meeting_s: float
    share: float
    """The part of the time that is spent at meetings."""

    def reason(self) -> str:
        """Return why, in a sentence."""
        cost = f"a meeting takes {self.meeting_s:.3g} s, {self.share:.1%} of the time"
        limit = f", for there are at most {MOST_STEPS}" if self.steps == MOST_STEPS and self.share > SHARE else ""
        return f"{self.steps} local step{'s' * (self.steps > 1)}: {cost}{limit}"


def choose_local_steps(
    *, num_bytes: float, workers: int, link: Link, compute_s: float, share: float = SHARE, most: int = MOST_STEPS
) -> LocalSteps:
    """Return the least number of steps of `compute_s` after which meeting over `link` takes `share` of the time."""
    meeting_s = ring(num_bytes, workers, link.bytes_per_s, link.latency_s).seconds if workers > 1 else 0.0
    wanted = math.ceil(meeting_s * (1 - share) / (share * max(compute_s, 1e-9)) - 1e-9)
    steps = min(max(wanted, 1), most)
    return LocalSteps(steps=steps, meeting_s=meeting_s, share=meeting_s / (steps * compute_s + meeting_s))

"""Batch shares for unequal devices: each replica takes as many samples as it computes while the others do theirs.

Samples are whole, so they are handed out one by one, each to the replica that would be done with it first
(`spec.parts.hand_out`, which live shares use as well).

Example: rates of 2, 1 and 1 samples a second and a batch of 9: parts 5, 2, 2 take 2.5 s; equal parts 3, 3, 3 take 3 s.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from shoal.core.errors import PlanError
from shoal.spec.parts import hand_out, parts
from shoal.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Shared:
    """How a global batch is cut for unequal replicas, and what that gains."""

    parts: tuple[int, ...]
    """Samples of each replica."""
    seconds: float
    """When the last replica is done."""
    equal_seconds: float
    """The same with equal parts."""

    @property
    def shares(self) -> tuple[float, ...]:
        """The fraction of each global batch that each replica takes: what the plan says."""
        return tuple(part / sum(self.parts) for part in self.parts)

    @property
    def gain(self) -> float:
        """How many times faster it is than equal parts."""
        return self.equal_seconds / self.seconds


def share_batch(batch_size: int, *, rates: Sequence[float], fixed_s: Sequence[float] = ()) -> Shared:
    """Return the parts of `batch_size` samples with which all replicas are done together, as nearly as can be.

    `rates` are samples a second; `fixed_s` is what a replica takes however many samples it has. Each gets at least one.
    """
    if batch_size < len(rates):
        raise PlanError(
            f"{len(rates)} replicas for a global batch of {batch_size} samples. "
            f"Use at most {batch_size} replicas, or a larger batch_size."
        )
    fixed = list(fixed_s) or [0.0] * len(rates)
    parts = hand_out(batch_size, sample_s=[1 / rate for rate in rates], fixed_s=fixed)
    equal = [batch_size // len(rates) + (i < batch_size % len(rates)) for i in range(len(rates))]
    return Shared(
        parts=tuple(parts),
        seconds=_last_s(parts, rates, fixed),
        equal_seconds=_last_s(equal, rates, fixed),
    )


def _last_s(parts: Sequence[int], rates: Sequence[float], fixed: Sequence[float]) -> float:
    return max(wait_s + part / rate for part, rate, wait_s in zip(parts, rates, fixed, strict=True))


def cut_batch(plan: Plan, batch_size: int) -> list[int]:
    """Return how many samples each replica takes of a global batch, as the loader cuts it."""
    if plan.batch.shares:
        return parts(batch_size, plan.batch.shares)
    # The same for equal shares, without a sum over all shares before each: a mesh may have thousands.
    count = plan.mesh.data
    bounds = [(2 * batch_size * i + count) // (2 * count) for i in range(count)]
    return [last - first for first, last in itertools.pairwise([*bounds, batch_size])]

"""A plan with every figure that `shoal plan` shows of it, and that plan.toml keeps as [predicted]."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from shoal.planner.machine import Machine
from shoal.planner.memory.peak import Peak, needed_bytes, peaks_of_stages
from shoal.planner.search.shares import cut_batch
from shoal.planner.time.refine import refine
from shoal.planner.time.stall import checkpoint_stall_s
from shoal.planner.time.steptime import StepTime, as_measured, largest_part, step_time
from shoal.spec.plan import Plan, Predicted
from shoal.spec.profile import Profile

_LISTED_WORKERS = 16
"""Up to how many workers a plan lists the peak of each; beyond, only the worst."""


@dataclass(frozen=True, kw_only=True)
class Ranked:
    """A plan and what it is predicted to cost."""

    plan: Plan
    time: StepTime
    recompute_s: float
    """Of the computing, what is done a second time."""
    peak: Peak
    needed_bytes: int
    """What the device must have: the peak with its error bar, and what a process takes."""
    samples_per_s: float

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        parts = dataclasses.asdict(self.time) | {"comm_s": self.time.comm_s, "step_s": self.time.step_s}
        return {
            "plan": dataclasses.asdict(self.plan),
            "time": parts | {"recompute_s": self.recompute_s},
            "memory": {
                "peak_bytes": self.peak.peak_bytes,
                "needed_bytes": self.needed_bytes,
                "parts": self.peak.parts,
                "moment": self.peak.moment,
            },
            "samples_per_s": self.samples_per_s,
        }


def cost_plan(plan: Plan, profile: Profile, machine: Machine, *, batch_size: int) -> Ranked:
    """Return `plan` with what it is predicted to cost."""
    time = refine(profile, plan, machine, batch_size=batch_size)
    return with_figures(plan, time, profile, machine, batch_size)


def with_figures(plan: Plan, time: StepTime, profile: Profile, machine: Machine, batch_size: int) -> Ranked:
    """Return `plan`, whose step takes `time` by arithmetic, with that as it is to be expected, and its memory."""
    time = as_measured(time, profile, plan, machine, batch_size=batch_size)
    parts = cut_batch(plan, batch_size)
    peaks = {part: peaks_of_stages(profile, plan, samples=part, device=machine.device) for part in set(parts)}
    worst = max((each for stages in peaks.values() for each in stages), key=lambda each: each.peak_bytes)
    listed: tuple[int, ...] = (worst.peak_bytes,)
    if plan.workers <= _LISTED_WORKERS:
        # In the order of workers: those of a stage together, neighbours along `tensor` next to each other.
        replicas = [(stage, part) for stage in range(plan.mesh.pipeline) for part in parts]
        listed = tuple(peaks[part][stage].peak_bytes for stage, part in replicas for _ in range(plan.mesh.tensor))
    fixed_s, sample_s = micro_batch_times(plan, profile, machine, batch_size=batch_size)
    predicted = Predicted(
        step_s=time.step_s,
        comm_s=time.comm_s,
        samples_per_s=batch_size / time.step_s,
        peak_bytes=listed,
        bubble_s=time.bubble_s,
        inside_bytes=time.inside_bytes,
        between_bytes=time.between_bytes,
        fixed_s=fixed_s,
        sample_s=sample_s,
        stall_s=checkpoint_stall_s(profile, plan, machine),
    )
    return Ranked(
        plan=dataclasses.replace(plan, predicted=predicted),
        time=time,
        recompute_s=_recompute_part(plan, profile, machine, batch_size) * time.compute_s,
        peak=worst,
        needed_bytes=needed_bytes(worst, machine.device),
        samples_per_s=batch_size / time.step_s,
    )


def micro_batch_times(
    plan: Plan, profile: Profile, machine: Machine, *, batch_size: int, whole: Profile | None = None
) -> tuple[float, float]:
    """Return what a micro-batch takes on the slowest stage however small it is, and what each of its samples adds.

    With fewer micro-batches, a step computes less by what all of them have in common. `whole` was traced with all
    samples of a worker at once: what products make of the weights of a layer hardly grows with the samples, and one
    trace alone cannot tell that from the rest.
    """
    samples = largest_part(plan, batch_size)
    at_once = min(samples, plan.batch.micro_batch or samples)
    other = samples if whole is not None else at_once // 2 or min(samples, 2 * at_once)
    compute_s = _compute_s(plan, profile, machine, batch_size)
    if other == at_once:
        return 0.0, compute_s / samples
    count, other_count = samples / at_once, samples / other
    other_s = _compute_s(_in_pieces(plan, other), whole or profile, machine, batch_size)
    fixed_s = max(0.0, (compute_s - other_s) / (count - other_count))
    return fixed_s, max(0.0, compute_s - count * fixed_s) / samples


def _compute_s(plan: Plan, profile: Profile, machine: Machine, batch_size: int) -> float:
    return step_time(profile, plan, machine, batch_size=batch_size).compute_s


def _in_pieces(plan: Plan, size: int) -> Plan:
    return dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, micro_batch=size))


def _recompute_part(plan: Plan, profile: Profile, machine: Machine, batch_size: int) -> float:
    """Return which part of the computing is done a second time."""
    once = dataclasses.replace(plan, recompute="none")
    both_s, once_s = (step_time(profile, each, machine, batch_size=batch_size).compute_s for each in (plan, once))
    return max(0.0, 1 - once_s / both_s) if both_s else 0.0

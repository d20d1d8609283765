"""Does a model fit a device, and which changes would make it fit, or fit a larger batch?

1. The peak of one worker at the asked micro-batch, with the parts that it is made of.
2. It fits where the peak, its error and what the process itself takes leave something over.
3. Each single change is tried (a smaller micro-batch, recompute, bf16, ZeRO over the fewest workers that do, tensor,
   pipeline), then the cheap ones together. What helps is listed by what it costs in time: device-seconds a sample,
   as a multiple of today's.
"""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shoal.planner.catalog import read_link
from shoal.planner.machine import Machine
from shoal.planner.memory.peak import Peak, needed_bytes, peak
from shoal.planner.search.validate import divisors
from shoal.planner.time.steptime import step_time
from shoal.spec.device import Device
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.profile import Layer, Profile

_DEGREES = tuple(2**power for power in range(1, 11))
_PER_NODE = 8
_BETWEEN = "ib-ndr"
"""What joins nodes where a change needs more than one and nobody said which link there is."""
_ROUNDS = 4
"""A pipeline of p stages is costed with 4p micro-batches: fewer would be mostly bubble."""
MOST_SAMPLES = 1 << 16
"""How far the largest micro-batch is looked for."""

ProfileIn = Callable[[str], Profile]
"""Returns the model's profile in a precision."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """Something to do differently, and what it brings."""

    title: str
    peak_bytes: int
    fits: bool
    time: float
    """Device-seconds a sample, as a multiple of those without the change."""
    largest_micro_batch: int
    """The largest micro-batch that fits with it; 0: none does."""
    workers: int = 1


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Whether a model fits a device: what it needs, against what is there."""

    fits: bool
    peak_bytes: int
    """The most that the allocator hands out, as torch.cuda.max_memory_allocated will say."""
    parts: dict[str, int]
    """What the peak is made of; it is their sum."""
    moment: str
    operation: str
    """The operation that reaches the peak."""
    needed_bytes: int
    """What the device must have: the peak with its error, and what a process takes before its first tensor."""
    memory_bytes: int
    device: str
    error: float
    """How far the peak may be off, as a fraction."""
    micro_batch: int
    precision: str
    dtype: str
    """Of most parameters."""
    parameters: int
    largest_micro_batch: int
    """The largest that fits as things are; 0: none does."""
    changes: tuple[Change, ...]
    layers: tuple[Layer, ...]
    """What was traced of each layer, in the order in which they run."""

    @property
    def margin_bytes(self) -> int:
        """What is left over; below 0: what is missing."""
        return self.memory_bytes - self.needed_bytes

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {**dataclasses.asdict(self), "margin_bytes": self.margin_bytes}


def estimate_fit(
    profile_in: ProfileIn, device: Device, *, title: str, precision: str, micro_batch: int, batch_size: int, gpu: bool
) -> Estimate:
    """Return whether one worker on `device` takes `micro_batch` samples at once of a batch of `batch_size`."""
    trial = _Trial(profile_in, device, batch_size=batch_size, gpu=gpu)
    plan = Plan(batch=Batch(micro_batch=micro_batch), precision=precision)
    worst = trial.peak(plan)
    return Estimate(
        fits=trial.fits(worst),
        peak_bytes=worst.peak_bytes,
        parts=worst.parts,
        moment=worst.moment,
        operation=worst.operation,
        needed_bytes=needed_bytes(worst, device),
        memory_bytes=device.memory_bytes,
        device=title,
        error=device.memory_error,
        micro_batch=micro_batch,
        precision=precision,
        dtype=profile_in(precision).dtype,
        parameters=profile_in(precision).parameters,
        largest_micro_batch=trial.largest_micro_batch(plan),
        changes=tuple(trial.changes(plan)),
        layers=profile_in(precision).layers,
    )


class _Trial:
    """Plans tried on one kind of device."""

    def __init__(self, profile_in: ProfileIn, device: Device, *, batch_size: int, gpu: bool) -> None:
        self.profile_in, self.device, self.batch_size, self.gpu = profile_in, device, batch_size, gpu

    def peak(self, plan: Plan) -> Peak:
        samples = self._samples(plan)
        return peak(self.profile_in(plan.precision), plan, samples=samples, device=self.device)

    def fits(self, worst: Peak) -> bool:
        return needed_bytes(worst, self.device) <= self.device.memory_bytes

    def changes(self, plan: Plan) -> list[Change]:
        """Return what lowers the peak: what then fits first, the cheapest in time first."""
        fits_now = self.fits(self.peak(plan))
        found = [self._change(title, changed, plan) for title, changed in self._singly(plan, fits_now)]
        if not fits_now and not any(change.fits for change in found):
            found += [self._change(title, changed, plan) for title, changed in self._together(plan)]
        now_bytes = self.peak(plan).peak_bytes
        helping = [change for change in found if change.peak_bytes < now_bytes]
        return sorted(helping, key=lambda change: (not change.fits, change.time, change.peak_bytes))

    def largest_micro_batch(self, plan: Plan) -> int:
        """Return the most samples at once that fit under `plan`, by doubling and bisection."""

        def fits(size: int) -> bool:
            return self.fits(self.peak(_with_micro_batch(plan, size)))

        if not fits(1):
            return 0
        low, high = 1, 2
        while fits(high):
            if high == MOST_SAMPLES:
                return high
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def _singly(self, plan: Plan, fits_now: bool) -> Iterator[tuple[str, Plan]]:
        if not fits_now and (size := self.largest_micro_batch(plan)):
            yield f"micro-batch {size}", _with_micro_batch(plan, size)
        for kind in ("selective", "full"):
            yield f"recompute {kind}", dataclasses.replace(plan, recompute=kind)
        if self._could_be_bf16(plan):
            yield "bf16 (autocast)", dataclasses.replace(plan, precision="bf16")
        yield from self._spread(plan)

    def _spread(self, plan: Plan) -> Iterator[tuple[str, Plan]]:
        """Yield `plan` over the fewest workers with which it fits; over all there can be, where it never does."""
        for stage in (1, 2, 3):
            meshes = (Mesh(shard=degree) for degree in _DEGREES)
            yield self._fewest(f"ZeRO-{stage} over", plan, meshes, zero=stage)
        profile = self.profile_in(plan.precision)
        if profile.heads > 1:
            yield self._fewest("tensor", plan, (Mesh(tensor=degree) for degree in divisors(profile.heads)[1:]))
        blocks = sum(layer.repeats for layer in profile.layers if layer.block)
        if blocks > 1 and not profile.batch_norms:  # which a pipeline's micro-batches would change
            yield self._fewest("pipeline", plan, (Mesh(pipeline=degree) for degree in divisors(blocks)[1:]))

    def _fewest(self, title: str, plan: Plan, meshes: Iterator[Mesh], zero: int = 0) -> tuple[str, Plan]:
        changed = plan
        for mesh in meshes:
            changed = dataclasses.replace(plan, mesh=mesh, zero=zero)
            if self.fits(self.peak(changed)):
                break
        return f"{title} {changed.mesh.workers}", changed

    def _together(self, plan: Plan) -> Iterator[tuple[str, Plan]]:
        cheap = dataclasses.replace(plan, recompute="full", batch=Batch(micro_batch=1))
        words = "recompute full, micro-batch 1"
        if self._could_be_bf16(plan):
            cheap, words = dataclasses.replace(cheap, precision="bf16"), f"bf16, {words}"
        yield words, cheap
        for title, changed in self._spread(cheap):
            yield f"{words}, {title}", changed

    def _could_be_bf16(self, plan: Plan) -> bool:
        return plan.precision == "fp32" and self.profile_in(plan.precision).dtype == "float32"

    def _change(self, title: str, changed: Plan, plan: Plan) -> Change:
        worst, samples = self.peak(changed), self._samples(changed)
        return Change(
            title=title,
            peak_bytes=worst.peak_bytes,
            fits=self.fits(worst),
            time=self._device_s_per_sample(changed, samples) / self._device_s_per_sample(plan, samples),
            largest_micro_batch=self.largest_micro_batch(changed),
            workers=changed.workers,
        )

    def _device_s_per_sample(self, plan: Plan, samples: int) -> float:
        batch_size = samples * plan.mesh.data
        time = step_time(self.profile_in(plan.precision), plan, self._machine(plan.workers), batch_size=batch_size)
        return time.step_s * plan.workers / batch_size

    def _samples(self, plan: Plan) -> int:
        """Return what a replica takes of a global batch: the job's, or enough to fill a pipeline."""
        at_once = plan.batch.micro_batch or 1
        return at_once * _ROUNDS * plan.mesh.pipeline if plan.mesh.pipeline > 1 else max(self.batch_size, at_once)

    def _machine(self, workers: int) -> Machine:
        # Processes on one processor share its memory: spreading over several helps on several hosts alone.
        per_node = min(workers, _PER_NODE) if self.gpu else 1
        between = read_link(_BETWEEN if self.gpu else "ethernet-10")
        inside = read_link(self.device.link or "loopback")
        return Machine(
            device=self.device,
            nodes=-(-workers // per_node),
            per_node=per_node,
            shared=not self.gpu,
            inside=inside,
            between=between,
            adapters=per_node,
        )


def _with_micro_batch(plan: Plan, size: int) -> Plan:
    return dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, micro_batch=size))

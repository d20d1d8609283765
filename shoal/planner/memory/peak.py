"""How much memory a worker needs at its worst moment, and what it is made of.

1. Lasting: parameters, gradients, optimizer state; divided by the tensor degree where products are, by the shards of
   ZeRO, and over pipeline stages by layer. And what a codec has not sent yet, which ZeRO does not divide: `residual`.
2. A forward piles up what the layers save for the backward, A(i) before layer i; a backward takes it down again. The
   worst moment of layer i is A(i) plus the peak that was traced within it. With micro-batches in flight through a
   pipeline, those before count in full.
3. Gradients come during the backward and go after the step, unless they stay: while micro-batches accumulate, in DDP's
   buckets, and in a pipeline. With FSDP2 they go to their shards as soon as the engine sends them (`planner.engine`);
   those of its root group at the end of the backward.
4. The optimizer's step has its own work space: torch's foreach AdamW holds the size of all parameters once more.
5. Recomputed layers keep their input alone. Autocast also caches the weights in bfloat16, to the forward's end; not
   on FSDP2, where that would undo the sharding and is switched off.
6. FSDP2 keeps shards alone between steps, and gathers: see `gathered`.
7. On a processor a heap that is left to itself keeps more than the tensors that come and go in a step:
   `heap_fraction` of them. Where the model is divided, workers do not leave it to itself (training/memory.py).

The worst of all moments is the peak. Example: 4 layers that save 10 MB each, with a backward peak of 25 MB in a layer
(its own 10 MB included): 3 * 10 + 25 = 55 MB on top of what lasts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.planner.engine import on_ddp, scatters_after, scatters_each
from shoal.planner.memory.gathered import Groups
from shoal.planner.memory.residual import keeps_residuals
from shoal.planner.memory.sizes import Sizes, sizes_of
from shoal.planner.stages import cut_into_stages, fullest_stages
from shoal.spec.device import Device
from shoal.spec.plan import Plan
from shoal.spec.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Peak:
    """The most that the worst worker holds: the parts of that moment, and when it is."""

    parts: dict[str, int]
    """Bytes by what they are for."""
    moment: str
    """When: "backward of blocks.5"."""
    operation: str = ""
    """Which operation brings it to the peak."""
    stage: int = 0

    @property
    def peak_bytes(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())


def peak(profile: Profile, plan: Plan, *, samples: int, device: Device | None = None) -> Peak:
    """Return the peak of the worst worker, when a replica takes `samples` of each global batch.

    `device` adds what its libraries take.
    """
    return max(_peaks(profile, plan, samples, device), key=lambda each: each.peak_bytes)


def peaks_of_stages(profile: Profile, plan: Plan, *, samples: int, device: Device | None = None) -> list[Peak]:
    """Return the peak of a worker of each pipeline stage."""
    return list(_peaks(profile, plan, samples, device, every=True))


def _peaks(profile: Profile, plan: Plan, samples: int, device: Device | None, *, every: bool = False) -> Iterator[Peak]:
    """Yield the peaks of the stages; but for `every`, of those alone that can have the highest."""
    cut = cut_into_stages if every else fullest_stages
    stages = cut(profile, plan.mesh.pipeline, chunks=plan.chunks, starts=plan.stages)
    at_once = min(samples, plan.batch.micro_batch or samples)
    ratio = at_once / profile.micro_batch
    sizes = {id(layer): sizes_of(layer, plan, ratio=ratio, dtype=profile.dtype) for layer in profile.layers}
    for stage in stages:
        layers = [(sizes[id(layer)], count) for layer, count in stage.layers]
        step = _Step(profile, plan, stage.index, layers, samples=samples, at_once=at_once)
        step.heap_fraction = device.heap_fraction if device and plan.mesh.keeps_whole else 0.0
        worst = max(step.moments(), key=lambda moment: moment.peak_bytes)
        parts = {**worst.parts, "framework": device.library_bytes if device else 0}
        yield Peak(parts=parts, moment=worst.moment, operation=worst.operation, stage=stage.index)


def needed_bytes(worst: Peak, device: Device) -> int:
    """Return what a device must have for a worker with this peak: with its error, and what its process takes."""
    return math.ceil(worst.peak_bytes * (1 + device.memory_error)) + device.reserved_bytes


def in_flight(plan: Plan, stage: int, micro_batches: int) -> float:
    """Return how many micro-batches `stage` holds at once, in those of all its layers."""
    stages = plan.mesh.pipeline
    if plan.schedule == "gpipe":
        return micro_batches
    if plan.schedule == "interleaved":  # each counts 1/chunks: the warm-up of Megatron's interleaved schedule
        warm_up = 2 * (stages - stage - 1) + (plan.chunks - 1) * stages + 1
        return min(warm_up, plan.chunks * micro_batches) / plan.chunks
    if (
        plan.schedule == "zero-bubble"
    ):  # ZB-H1 puts off the gradients of weights: every stage holds as many as the first
        return min(stages, micro_batches)
    return min(stages - stage, micro_batches)


class _Step:
    """A step of a worker of one stage, moment by moment."""

    def __init__(
        self, profile: Profile, plan: Plan, stage: int, layers: list[tuple[Sizes, int]], *, samples: int, at_once: int
    ) -> None:
        self.profile, self.plan, self.stage, self.layers = profile, plan, stage, layers
        self.heap_fraction = 0.0
        self.at_once = at_once
        self.micro_batches = -(-samples // at_once)
        self.groups = Groups(plan, self.layers, micro_batches=self.micro_batches)
        self.parameters, self.gradients = self._total("parameters"), self._total("gradients")
        padding = sum(count * sizes.padding * sizes.parameters for sizes, count in self.layers)
        self.padding = padding / max(1, self.parameters)
        accumulates = self.micro_batches > 1 and not scatters_each(plan)
        self.stay = accumulates or on_ddp(plan) or scatters_after(plan)
        """Whether all gradients are there, whole, from one micro-batch to the next, or as DDP's buckets."""

    def moments(self) -> Iterator[Peak]:
        """Yield the moments at which the worker may hold the most: in each layer, and in the optimizer's step."""
        lasting = self._lasting()
        yield from self._passes(lasting)
        if self.groups.used:
            waiting = self.gradients if self.stay else self._later(0) + self._between()
            parts = {**lasting, "gradients": waiting, "transient": 0, "communication": self.groups.at_the_end()}
            yield self._moment(parts, "sending the last gradients", "reduce_scatter")
        shards = self.plan.mesh.shard
        share = self.parameters / max(1, self.profile.parameter_bytes)
        work_bytes = int(self.profile.optimizer_work_bytes * share / shards)
        parts = {**lasting, "gradients": self.gradients // shards, "transient": work_bytes}
        yield self._moment(parts, "the optimizer's step", "optimizer")

    def _lasting(self) -> dict[str, int]:
        shards = self.plan.mesh.shard
        residuals = {"residuals": self._total("residuals")} if keeps_residuals(self.plan) else {}
        return {
            **residuals,
            "parameters": self.parameters // shards,
            "optimizer": self._total("optimizer") // shards,
            "inputs": self.profile.input_bytes * self.at_once // self.profile.micro_batch,
        }

    def _passes(self, lasting: dict[str, int]) -> Iterator[Peak]:
        piled = int((in_flight(self.plan, self.stage, self.micro_batches) - 1) * max(0, self._total("saved")))
        cast = 0
        before = self.gradients if self.stay else self._between()
        for position, (sizes, count) in enumerate(self.layers):
            later = self._later(position + 1)
            for nth in sorted({0, count - 1}):
                name = sizes.name if count == 1 else f"{sizes.name} (number {nth + 1} of {count})"
                gathered = self.groups.while_running(position, nth)
                saved = piled + nth * sizes.saved
                parts = {**lasting, "gradients": before}
                parts |= {"activations": saved + cast + nth * sizes.cast, "transient": sizes.forward_peak}
                yield self._moment({**parts, "communication": gathered.forward}, f"forward of {name}", sizes.forward_at)
                come = 0 if self.stay else later + (count - 1 - nth) * self._waiting(sizes)
                rise = sizes.backward_peak if self.stay else sizes.backward_own
                parts = {**lasting, "gradients": before + come, "activations": saved, "transient": rise}
                yield self._moment(
                    {**parts, "communication": gathered.backward}, f"backward of {name}", sizes.backward_at
                )
            piled += count * sizes.saved
            cast += count * sizes.cast

    def _between(self) -> int:
        """Return what lies there of gradients from one micro-batch to the next, as shards."""
        return self.gradients // self.plan.mesh.shard if self.micro_batches > 1 else 0

    def _later(self, position: int) -> int:
        """Return the gradients that a backward has brought when it is done with the layers from `position` on."""
        return sum(count * self._waiting(sizes) for sizes, count in self.layers[position:])

    def _waiting(self, sizes: Sizes) -> int:
        """Return what the gradients of a layer take once its backward is done, beside those from micro-batches before.

        Those of FSDP's root stay whole until all is done.
        """
        if sizes.block and self.micro_batches > 1:
            return 0  # added to the shards that are there
        return sizes.gradients // (self.plan.mesh.shard if sizes.block else 1)

    def _moment(self, parts: dict[str, int], moment: str, operation: str) -> Peak:
        states = parts["parameters"] + parts["optimizer"] + parts["gradients"] + parts.get("communication", 0)
        passing = parts.get("activations", 0) + parts["transient"] + (0 if self.stay else parts["gradients"])
        parts = {**parts, "fragmentation": int(states * self.padding) + int(self.heap_fraction * passing)}
        return Peak(parts=parts, moment=moment, operation=operation, stage=self.stage)

    def _total(self, of: str) -> int:
        return sum(count * int(getattr(sizes, of)) for sizes, count in self.layers)

"""How much memory a worker needs at its worst moment, and what it is made of.

1. Lasting: parameters, gradients, optimizer state; divided by the tensor degree where products are, by the ZeRO degree
   where its stage says so, and over pipeline stages by layer.
2. A forward piles up what the layers save for the backward, A(i) before layer i; a backward takes it down again. The
   worst moment of layer i is A(i) plus the peak that was traced within it. With micro-batches in flight through a
   pipeline, those before count in full.
3. Gradients come during the backward and go after the step, unless they stay: while micro-batches accumulate, and in
   DDP's buckets.
4. The optimizer's step has its own work space: torch's foreach AdamW holds the size of all parameters once more.
5. Recomputed layers keep their input alone. Autocast also caches the weights in bfloat16, to the forward's end; not
   with ZeRO-2 and -3, where that would undo the sharding and is switched off.
6. ZeRO-2 and -3 (FSDP2): see `gathered`.
7. On a processor the heap keeps more than the tensors that come and go in a step: `heap_fraction` of them.

The worst of all moments is the peak. Example: 4 layers that save 10 MB each, with a backward peak of 25 MB in a layer
(its own 10 MB included): 3 * 10 + 25 = 55 MB on top of what lasts.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal.planner.memory.gathered import gathered_bytes
from shoal.planner.memory.sizes import Sizes, sizes_of
from shoal.planner.stages import Stage, cut_into_stages
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
    stages = cut_into_stages(profile, plan.mesh.pipeline)
    edges = sorted({0, len(stages) - 1})  # those between hold no embedding and no head, and less in flight
    heap_fraction = device.heap_fraction if device else 0.0
    steps = [_Step(profile, plan, stages[edge], samples=samples, heap_fraction=heap_fraction) for edge in edges]
    worst = max((moment for step in steps for moment in step.moments()), key=lambda moment: moment.peak_bytes)
    parts = {**worst.parts, "framework": device.library_bytes if device else 0}
    return Peak(parts=parts, moment=worst.moment, operation=worst.operation, stage=worst.stage)


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

    def __init__(self, profile: Profile, plan: Plan, stage: Stage, *, samples: int, heap_fraction: float = 0.0) -> None:
        self.profile, self.plan, self.stage = profile, plan, stage
        self.heap_fraction = heap_fraction
        self.at_once = min(samples, plan.batch.micro_batch or samples)
        self.micro_batches = -(-samples // self.at_once)
        ratio = self.at_once / profile.micro_batch
        self.layers = [(sizes_of(layer, plan, ratio=ratio), count) for layer, count in stage.layers]
        self.shards = plan.mesh.shard if plan.zero >= 2 else 1
        """Over how many workers gradients are spread; parameters, too, where they are not gathered."""
        self.gradients = self._total("gradients") // self.shards
        # They stay while micro-batches accumulate, and in DDP's buckets.
        self.stay = self.micro_batches > 1 or (plan.mesh.data > 1 and plan.zero < 2)

    def moments(self) -> Iterator[Peak]:
        """Yield the moments at which the worker may hold the most: in each layer, and in the optimizer's step."""
        lasting = self._lasting()
        yield from self._passes(lasting)
        shards = self.plan.mesh.shard if self.plan.zero >= 1 else 1
        share = self._total("parameters") / max(1, self.profile.parameter_bytes)
        work_bytes = int(self.profile.optimizer_work_bytes * share / shards)
        parts = {**lasting, "gradients": self.gradients, "transient": work_bytes}
        yield self._moment(parts, "the optimizer's step", "optimizer")

    def _lasting(self) -> dict[str, int]:
        return {
            "parameters": self._total("parameters") // self.shards,
            "optimizer": self._total("optimizer") // (self.plan.mesh.shard if self.plan.zero >= 1 else 1),
            "inputs": self.profile.input_bytes * self.at_once // self.profile.micro_batch,
        }

    def _passes(self, lasting: dict[str, int]) -> Iterator[Peak]:
        piled = int((in_flight(self.plan, self.stage.index, self.micro_batches) - 1) * max(0, self._total("saved")))
        cast = 0
        later = sum(count * self._waiting(sizes) for sizes, count in self.layers)
        for position, (sizes, count) in enumerate(self.layers):
            later -= count * self._waiting(sizes)
            for nth in sorted({0, count - 1}):
                name = sizes.name if count == 1 else f"{sizes.name} (number {nth + 1} of {count})"
                gathered = gathered_bytes(self.plan, self.layers, position, nth)
                saved = piled + nth * sizes.saved
                parts = {**lasting, "gradients": self.gradients if self.stay else 0}
                parts |= {"activations": saved + cast + nth * sizes.cast, "transient": sizes.forward_peak}
                yield self._moment({**parts, "communication": gathered.forward}, f"forward of {name}", sizes.forward_at)
                come = self.gradients if self.stay else later + (count - 1 - nth) * self._waiting(sizes)
                rise = sizes.backward_peak if self.stay and self.shards == 1 else sizes.backward_own
                parts = {**lasting, "gradients": come, "activations": saved, "transient": rise}
                yield self._moment(
                    {**parts, "communication": gathered.backward}, f"backward of {name}", sizes.backward_at
                )
            piled += count * sizes.saved
            cast += count * sizes.cast

    def _waiting(self, sizes: Sizes) -> int:
        """Return what the gradients of a layer take once its backward is done: those of FSDP's root stay whole."""
        return sizes.gradients // (self.shards if sizes.block else 1)

    def _moment(self, parts: dict[str, int], moment: str, operation: str) -> Peak:
        states = parts["parameters"] + parts["optimizer"] + parts["gradients"] + parts.get("communication", 0)
        padding = sum(count * sizes.padding * sizes.parameters for sizes, count in self.layers)
        padding_bytes = int(states * padding / max(1, self._total("parameters")))
        passing = parts.get("activations", 0) + parts["transient"] + (0 if self.stay else parts["gradients"])
        parts = {**parts, "fragmentation": padding_bytes + int(self.heap_fraction * passing)}
        return Peak(parts=parts, moment=moment, operation=operation, stage=self.stage.index)

    def _total(self, of: str) -> int:
        return sum(count * int(getattr(sizes, of)) for sizes, count in self.layers)

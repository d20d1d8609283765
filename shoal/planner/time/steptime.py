"""How long a step takes under a plan, and what it is made of: formulas 13 to 16 of docs/planner-model.md.

1. Each layer's passes at this micro-batch and tensor degree (`compute`), with the messages inside them, summed over
   the stages of the pipeline (`stagetime`).
2. The slowest stage works m times for m micro-batches; once, one also goes through all the others: the bubble.

       m * slowest + (sum of the others) * share of the schedule + sends that show

   The share is 1 for 1f1b and gpipe, 1 / chunks interleaved, and what is not the backward for zero-bubble.
3. The exchange of gradients and parameters, as far as it shows (`exchange`), and the optimizer's step.
4. `as_measured` multiplies it with what remained where similar plans were measured (`nearby`). It is how long to expect
   a plan to take; plans are ranked without it.

Example: 4 equal stages of 10 ms forward and 20 ms backward, 8 micro-batches, 1f1b: 8 * 30 + 3 * 30 = 330 ms.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass, fields, replace

from shoal.planner.machine import Machine
from shoal.planner.time.compute import PassTime, Rates, Split, rates_of
from shoal.planner.time.exchange import Exchange, Held, exchange_of
from shoal.planner.time.nearby import layer_flops_of
from shoal.planner.time.stagetime import Pipeline, StageTime, StageTimes, pieces_of
from shoal.planner.time.traffic import Groups, exchange_overlaps, groups_of
from shoal.spec.plan import Mesh, Plan
from shoal.spec.profile import Profile
from shoal.spec.sync import Sync


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Seconds of one step of the slowest worker, by what they go to; and what one worker sends."""

    compute_s: float
    """Forward and backward of its own layers, what is computed again included, and gradients summed in passing."""
    optimizer_s: float
    tensor_s: float
    """Messages inside layers, as far as they show."""
    pipeline_s: float
    """Sends between stages, as far as they show."""
    data_s: float
    """The exchange of gradients and parameters, as far as it shows."""
    bubble_s: float
    """Waiting for the other stages of a pipeline."""
    inside_bytes: int
    """Bytes that one worker sends in a step to workers of its own node."""
    between_bytes: int
    """Bytes that one worker sends in a step to other nodes."""

    @property
    def comm_s(self) -> float:
        """All messages, as far as they show."""
        return self.tensor_s + self.pipeline_s + self.data_s

    @property
    def step_s(self) -> float:
        """The whole step."""
        return self.compute_s + self.optimizer_s + self.comm_s + self.bubble_s


def step_time(profile: Profile, plan: Plan, machine: Machine, *, batch_size: int, overlap: bool = True) -> StepTime:
    """Return how long a step of `batch_size` samples takes; `overlap`: whether gradients travel beside the backward."""
    return _costs_of(profile, machine).step_time(plan, batch_size=batch_size, overlap=overlap)


def as_measured(time: StepTime, profile: Profile, plan: Plan, machine: Machine, *, batch_size: int) -> StepTime:
    """Return `time` of a plan times what a calibration found near it; the same where there is none.

    Not for choosing a plan: what one layout happened to take says little about the next. Over 30 random halves of the
    public multi-node measurements, the first of 4 rankings was among the three fastest measured in 119 of 120 without
    it, in 103 with it; the error of the time itself was 7.9% without, 6.0% with it (2026-11).
    """
    if machine.nearby is None:
        return time
    samples = largest_part(plan, batch_size)
    factor = machine.nearby.factor(
        layer_flops_of(profile),
        tensor=plan.mesh.tensor,
        pipeline=plan.mesh.pipeline,
        micro_batch=min(samples, plan.batch.micro_batch or samples),
    )
    names = (field.name for field in fields(time) if field.name.endswith("_s"))
    return replace(time, **{name: factor * getattr(time, name) for name in names})


_KEPT = 64
"""How many pairs of a profile and a machine stay prepared: a calibration has some tens of models."""
_prepared: "OrderedDict[tuple[int, int], _Costs]" = OrderedDict()


def _costs_of(profile: Profile, machine: Machine) -> "_Costs":
    # By identity: hashing a profile takes longer than a step_time. What is kept holds both, so no id comes again.
    key = (id(profile), id(machine))
    found = _prepared.get(key)
    if found is None:
        found = _prepared[key] = _Costs(profile, machine)
        if len(_prepared) > _KEPT:
            _prepared.popitem(last=False)
    return found


class _Costs:
    """A profile on a machine. What plans have in common is worked out once."""

    def __init__(self, profile: Profile, machine: Machine) -> None:
        self.profile, self.machine = profile, machine
        self.parameters = max(1, profile.parameters)
        self.num_layers = profile.num_layers
        cut = [layer for layer in profile.layers if layer.block] or profile.layers
        self.sent_bytes = max(layer.output_bytes for layer in cut)
        self._stage_times: dict[int, StageTimes] = {}
        self._groups: dict[tuple[Mesh, Sync], Groups] = {}

    def step_time(self, plan: Plan, *, batch_size: int, overlap: bool) -> StepTime:
        mesh = plan.mesh
        samples = largest_part(plan, batch_size)
        at_once = min(samples, plan.batch.micro_batch or samples)
        micro_batches = samples / at_once  # the last one may be smaller, and takes less
        groups = self._groups_of(mesh, plan.sync)
        times = self._times(min(mesh.workers, self.machine.per_node))
        split = Split(
            at_once / self.profile.micro_batch, mesh.tensor, accumulates=samples > at_once, sequence=plan.sequence
        )
        pipeline = times.pipeline(pieces_of(plan), split, plan.recompute, groups.tensor)
        slowest = pipeline.slowest
        pipeline_s, sends = self._sends(plan, groups, split.ratio, micro_batches)
        found, optimizer_s = self._ending(
            plan, groups, pipeline, times.rates, rounds=math.ceil(micro_batches), overlap=overlap
        )
        inside, between = groups.tensor.gather_bytes(2 * micro_batches * slowest.summed_bytes)
        return StepTime(
            compute_s=micro_batches * slowest.compute_s + found.in_backward_s,
            optimizer_s=optimizer_s,
            tensor_s=micro_batches * (slowest.seconds - slowest.compute_s),
            pipeline_s=pipeline_s,
            data_s=found.seconds,
            bubble_s=bubble_s(plan, pipeline),
            inside_bytes=int(inside + found.inside_bytes + sends[0]),
            between_bytes=int(between + found.between_bytes + sends[1]),
        )

    def _sends(
        self, plan: Plan, groups: Groups, ratio: float, micro_batches: float
    ) -> tuple[float, tuple[float, float]]:
        """Return what shows of the sends between stages, and what a worker sends inside its node and to others."""
        stages = plan.mesh.pipeline
        if stages == 1:
            return 0.0, (0.0, 0.0)
        inside = groups.next_stage.nodes == 1
        rate, latency_s = groups.next_stage.slowest
        shown = 2.0 * (plan.chunks * stages - 1)  # one micro-batch on its way through and back
        if not (self.machine.inside if inside else self.machine.between).overlaps:
            shown += 2 * plan.chunks * (micro_batches - 1)
        sent_bytes = 2 * plan.chunks * micro_batches * ratio * self.sent_bytes
        shown_s = shown * (latency_s + ratio * self.sent_bytes / rate)
        return shown_s, (sent_bytes, 0.0) if inside else (0.0, sent_bytes)

    def _ending(
        self, plan: Plan, groups: Groups, pipeline: Pipeline, rates: Rates, *, rounds: int, overlap: bool
    ) -> tuple[Exchange, float]:
        """Return the exchange and the optimizer's seconds, of that stage of the pipeline where both take longest."""
        overlaps = overlap and exchange_overlaps(self.machine, groups)
        found = []
        for stage in pipeline.different:
            held = Held(
                stage.gradient_bytes,
                stage.parameter_bytes,
                stage.layers,
                stage.forward_s,
                stage.again_s + stage.backward_s,
                rounds,
                rates.memory_bytes_per_s,
                rates.update_bytes_per_s,
            )
            exchange = exchange_of(plan, groups, held, overlaps=overlaps)
            found.append((exchange, self._optimizer_s(plan, stage, rates)))
        return max(found, key=lambda both: both[0].seconds + both[1])

    def _optimizer_s(self, plan: Plan, stage: StageTime, rates: Rates) -> float:
        profile = self.profile
        share = stage.parameters / self.parameters / (plan.mesh.shard if plan.zero else 1)
        work_s = profile.optimizer_moved_bytes * share / rates.update_bytes_per_s
        starts = profile.optimizer_operations * stage.layers / self.num_layers
        return PassTime(work_s, starts * rates.operation_s).seconds(rates)

    def _times(self, neighbours: int) -> StageTimes:
        crowd = neighbours if self.machine.shared else 1
        if crowd not in self._stage_times:
            rates = rates_of(self.machine, self.profile.products_in, neighbours=crowd)
            self._stage_times[crowd] = StageTimes(self.profile, rates)
        return self._stage_times[crowd]

    def _groups_of(self, mesh: Mesh, sync: Sync) -> Groups:
        if (mesh, sync) not in self._groups:
            self._groups[mesh, sync] = groups_of(self.machine, mesh, sync)
        return self._groups[mesh, sync]


def bubble_s(plan: Plan, pipeline: Pipeline) -> float:
    """Return how long the slowest stage waits for the others in a step."""
    if plan.schedule == "interleaved":
        return pipeline.others_s / plan.chunks
    if plan.schedule == "zero-bubble":  # the gradients of weights, half of a backward, fill what they can
        slowest = pipeline.slowest
        return pipeline.others_s * (slowest.forward_s + slowest.again_s) / slowest.seconds
    return pipeline.others_s


def largest_part(plan: Plan, batch_size: int) -> int:
    """Return the samples of the replica that takes the most of a global batch."""
    share = max(plan.batch.shares, default=1 / plan.mesh.data)
    return max(1, math.ceil(share * batch_size - 1e-6))

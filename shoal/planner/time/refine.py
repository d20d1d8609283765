"""The step time of a plan, refined: the closed forms of the search, with the bubble and what shows of the messages
taken from a simulated step.

1. The forward and backward of every piece of the model (`stagetime`) go through the pipeline's schedule, with and
   without the time that sends take: that gives the bubble, and what the sends add.
2. Gradients travel beside the last backward, slice by slice, or behind it (`planner.engine`); parameters that ZeRO
   gathers come one layer ahead. What shows of that lengthens every micro-batch, or the end of the step.
3. The step ends when the last stage has its gradients and has stepped its optimizer: one that is done early with its
   last backward hides its messages behind the others' work.
"""

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from shoal.planner.engine import frees_parameters, scatters_after, scatters_each
from shoal.planner.machine import Machine
from shoal.planner.time.compute import Split, rates_of
from shoal.planner.time.exchange import bucket_of
from shoal.planner.time.simulate import Layered, Piece, Timeline, simulate_overlap, simulate_pipeline
from shoal.planner.time.stagetime import StageTime, StageTimes, pieces_of
from shoal.planner.time.steptime import StepTime, largest_part, step_time
from shoal.planner.time.traffic import Groups, exchange_overlaps, groups_of
from shoal.spec.plan import Plan
from shoal.spec.profile import Profile

_MOST_BUCKETS = 8
"""Into how many buckets the gradients of a layer are cut at most: more change what shows by less than a percent."""
_ROUNDS = 2
"""How many times as many micro-batches as stages are simulated: after that, each adds the time of the slowest stage."""


def refine(profile: Profile, plan: Plan, machine: Machine, *, batch_size: int) -> StepTime:
    """Return the step time of `plan`, with the bubble and the messages that show in a simulated step."""
    closed = step_time(profile, plan, machine, batch_size=batch_size)
    step = _Step(profile, plan, machine, batch_size)
    busy_s = closed.compute_s + closed.tensor_s
    in_passes_s = step.micro_batches * sum(step.exposed_in_passes[step.slowest])
    without_sends_s, passes_s = step.passes_s() if plan.mesh.pipeline > 1 else (busy_s + in_passes_s,) * 2
    end_s, optimizer_s = step.ending(passes_s, closed.optimizer_s, closed.data_s)
    return dataclasses.replace(
        closed,
        tensor_s=max(0.0, closed.tensor_s),
        optimizer_s=optimizer_s,
        data_s=max(0.0, in_passes_s + end_s - passes_s - optimizer_s),
        pipeline_s=max(0.0, passes_s - without_sends_s),
        bubble_s=max(0.0, without_sends_s - busy_s - in_passes_s),
    )


def timeline_of(profile: Profile, plan: Plan, machine: Machine, *, batch_size: int) -> Timeline:
    """Return what the stages of a plan's pipeline do in one step."""
    return _Step(profile, plan, machine, batch_size).timeline()


@dataclass(frozen=True)
class _Step:
    profile: Profile
    plan: Plan
    machine: Machine
    batch_size: int

    @cached_property
    def at_once(self) -> int:
        samples = largest_part(self.plan, self.batch_size)
        return min(samples, self.plan.batch.micro_batch or samples)

    @cached_property
    def micro_batches(self) -> float:
        return largest_part(self.plan, self.batch_size) / self.at_once

    @cached_property
    def groups(self) -> Groups:
        return groups_of(self.machine, self.plan.mesh, self.plan.sync)

    @cached_property
    def pieces(self) -> list[list[StageTime]]:
        """The layers of each piece of the model, in order: what each takes and holds."""
        mesh = self.plan.mesh
        neighbours = min(mesh.workers, self.machine.per_node)
        times = StageTimes(self.profile, rates_of(self.machine, self.profile.products_in, neighbours=neighbours))
        split = Split(
            self.at_once / self.profile.micro_batch,
            mesh.tensor,
            accumulates=self.micro_batches > 1,
            sequence=self.plan.sequence,
        )
        return times.layers_of_pieces(pieces_of(self.plan), split, self.plan.recompute, self.groups.tensor)

    @cached_property
    def stages(self) -> list[list[StageTime]]:
        """The layers of each stage."""
        count = self.plan.mesh.pipeline
        return [[layer for piece in self.pieces[stage::count] for layer in piece] for stage in range(count)]

    @cached_property
    def slowest(self) -> int:
        return max(range(len(self.stages)), key=lambda stage: sum(layer.seconds for layer in self.stages[stage]))

    @cached_property
    def overlaps(self) -> bool:
        """Whether messages run beside computing, and are not squeezed or served: then the closed form stands."""
        plain = self.plan.sync.mode == "all-reduce" and self.plan.sync.codec == "none"
        return exchange_overlaps(self.machine, self.groups) and plain and self.plan.mesh.data > 1

    # The pipeline

    def timeline(self, *, send_s: float | None = None, micro_batches: int | None = None) -> Timeline:
        plan = self.plan
        pieces = [self._piece(number) for number in range(len(self.pieces))]
        return simulate_pipeline(
            pieces,
            stages=plan.mesh.pipeline,
            micro_batches=micro_batches or math.ceil(self.micro_batches),
            schedule=plan.schedule,
            send_s=self._send_s if send_s is None else send_s,
        )

    def passes_s(self) -> tuple[float, float]:
        """Return how long the pipeline takes over all micro-batches, without and with the time of sends."""
        stages, count = self.plan.mesh.pipeline, math.ceil(self.micro_batches)
        few = min(count, _ROUNDS * stages) if count % stages == 0 else count
        each_s = sum(layer.seconds for layer in self.stages[self.slowest]) + sum(self.exposed_in_passes[self.slowest])
        rest_s = (count - few) * each_s
        without_s = self.timeline(send_s=0.0, micro_batches=few).makespan_s
        return without_s + rest_s, self.timeline(micro_batches=few).makespan_s + rest_s

    def _piece(self, number: int) -> Piece:
        layers = self.pieces[number]
        forward_more_s, backward_more_s = self.exposed_in_passes[number % self.plan.mesh.pipeline]
        backward_s = sum(layer.backward_s for layer in layers)
        return Piece(
            forward_s=sum(layer.forward_s for layer in layers) + forward_more_s / self.plan.chunks,
            backward_s=backward_s + sum(layer.again_s for layer in layers) + backward_more_s / self.plan.chunks,
            weights_s=backward_s / 2,  # of the two products of a backward, one is for the weights
        )

    @property
    def _send_s(self) -> float:
        rate, latency_s = self.groups.next_stage.slowest
        sent_bytes = max((layer.output_bytes for layer in self.profile.layers[:-1]), default=0)
        return latency_s + sent_bytes * self.at_once / self.profile.micro_batch / rate

    # The messages

    @cached_property
    def exposed_in_passes(self) -> list[tuple[float, float]]:
        """What shows of ZeRO's messages in each stage's forward and backward of every micro-batch."""
        if not self.overlaps or not scatters_each(self.plan):
            return [(0.0, 0.0)] * len(self.stages)
        gathers = frees_parameters(self.plan)
        return [
            (
                simulate_overlap(self._forward(layers)).exposed_s if gathers else 0.0,
                simulate_overlap(self._backward(layers, gathers=gathers)).exposed_s,
            )
            for layers in self.stages
        ]

    def ending(self, passes_s: float, optimizer_s: float, closed_s: float) -> tuple[float, float]:
        """Return when the last stage is done with gradients and optimizer, and what its optimizer took.

        `passes_s` is when the first stage, the last to do so, has ended its last backward.
        """
        if not self.overlaps:
            return passes_s + closed_s + optimizer_s, optimizer_s
        most = max(sum(layer.parameters for layer in layers) for layers in self.stages)
        ends = []
        for layers, early_s in zip(self.stages, self._early_s(), strict=True):
            own_s = optimizer_s * sum(layer.parameters for layer in layers) / max(1.0, most)
            ends.append((passes_s - early_s + self._exposed_at_end(layers) + own_s, own_s))
        end_s, own_s = max(ends)
        return end_s, min(own_s, end_s - passes_s)

    def _early_s(self) -> list[float]:
        """Return how long before the last stage's last backward each one has ended its own."""
        if self.plan.mesh.pipeline == 1:
            return [0.0]
        after_s = [sum(layer.again_s + layer.backward_s for layer in layers) for layers in self.stages]
        return [sum(after_s[:stage]) / self.plan.chunks for stage in range(len(after_s))]

    def _exposed_at_end(self, layers: list[StageTime]) -> float:
        """Return what shows of that which goes once a step: gathered in its first forward, sent at its end."""
        plan = self.plan
        if frees_parameters(plan):
            return 0.0
        gathered_s = simulate_overlap(self._forward(layers)).exposed_s if plan.zero else 0.0
        if scatters_each(plan):
            return gathered_s
        if scatters_after(plan):
            return gathered_s + self._reduce_s(sum(layer.gradient_bytes for layer in layers))
        return gathered_s + simulate_overlap(self._backward(layers)).exposed_s

    def _forward(self, layers: list[StageTime]) -> list[Layered]:
        gather_s = self.groups.shard.gather_s
        return [Layered(layer.forward_s, gather_s=gather_s(layer.parameter_bytes)) for layer in layers]

    def _backward(self, layers: list[StageTime], *, gathers: bool = False) -> list[Layered]:
        """Return a stage's backward: of ZeRO layer by layer, otherwise in buckets, of one large layer or some small."""
        out: list[Layered] = []
        waiting_bytes, bucket_bytes = 0.0, bucket_of(self.plan, self.groups.data)
        for layer in reversed(layers):
            buckets = 1 if self.plan.zero else min(_MOST_BUCKETS, int(layer.gradient_bytes / bucket_bytes))
            compute_s = (layer.again_s + layer.backward_s) / max(1, buckets)
            gather_s = self.groups.shard.gather_s(layer.parameter_bytes) if gathers else 0.0
            for number in range(max(1, buckets)):
                waiting_bytes += layer.gradient_bytes / max(1, buckets)
                is_full = buckets > 0 or waiting_bytes >= bucket_bytes
                out.append(
                    Layered(compute_s, 0.0 if number else gather_s, self._reduce_s(waiting_bytes) if is_full else 0.0)
                )
                waiting_bytes = 0.0 if is_full else waiting_bytes
        return [*out, Layered(0.0, reduce_s=self._reduce_s(waiting_bytes))] if waiting_bytes else out

    def _reduce_s(self, num_bytes: float) -> float:
        if self.plan.zero == 0:
            return self.groups.data.all_reduce_s(num_bytes)
        shard = self.groups.shard
        return shard.gather_s(num_bytes) + self.groups.replicate.all_reduce_s(num_bytes / shard.size)

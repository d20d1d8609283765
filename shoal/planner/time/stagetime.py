"""How long the stages of a pipeline take over one micro-batch: the layers of each, with the messages inside them.

A layer with pairs sums its output over the tensor group in the forward, once for each pair, and the gradient of its
input in the backward; computing it again sums its output again. The worker waits for each of these sums.
"""

from typing import NamedTuple, TypeAlias

from shoal.planner.stages import cut_into_stages
from shoal.planner.time.compute import EXCHANGE_OPERATIONS, LayerCost, PassTime, Rates, Split
from shoal.planner.time.traffic import Group
from shoal.spec.profile import Layer, Profile


class StageTime(NamedTuple):
    """What a stage takes over one micro-batch, and what each of its workers holds."""

    forward_s: float = 0.0
    again_s: float = 0.0
    """Computing again, before the backward."""
    backward_s: float = 0.0
    compute_s: float = 0.0
    """Of all three, what is not waiting for messages."""
    summed_bytes: float = 0.0
    """Bytes that are summed over the tensor group in all three."""
    layers: float = 0
    parameters: float = 0.0
    parameter_bytes: float = 0.0
    gradient_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """All three passes."""
        return self.forward_s + self.again_s + self.backward_s

    def add(self, other: "StageTime", count: int) -> "StageTime":
        """Return this stage with `count` times the other behind it."""
        return StageTime(*(mine + count * theirs for mine, theirs in zip(self, other, strict=True)))


class Pipeline(NamedTuple):
    """The stages of one plan, as far as its time depends on them."""

    slowest: StageTime
    others_s: float
    """All stages but the slowest, summed."""
    ends: tuple[StageTime, ...]
    """The first and the last, one where there is one: they hold the most."""


_Cut: TypeAlias = tuple[tuple[int, int], ...]
"""A stage by the numbers of its layers, each with how often it is there."""


class StageTimes:
    """The layers of a profile on a worker with certain rates; each way to split them is worked out once."""

    def __init__(self, profile: Profile, rates: Rates) -> None:
        self.profile, self.rates = profile, rates
        self._costs = [LayerCost(layer, profile, rates) for layer in profile.layers]
        self._number = {id(layer): number for number, layer in enumerate(profile.layers)}
        self._cuts: dict[int, list[_Cut]] = {}
        self._known: dict[tuple[int, Split, str], Pipeline] = {}

    def pipeline(self, stages: int, split: Split, recompute: str, tensor_group: Group) -> Pipeline:
        """Return the stages of a pipeline whose workers take `split` of each layer."""
        key = (stages, split, recompute)
        if key not in self._known:
            layers = [self._layer(number, split, recompute, tensor_group) for number in range(len(self.profile.layers))]
            cut = self._cut(stages)
            different = {stage: _sum(layers, stage) for stage in set(cut)}
            self._known[key] = _pipeline([different[stage] for stage in cut])
        return self._known[key]

    def layers_of_stages(self, stages: int, split: Split, recompute: str, tensor_group: Group) -> list[list[StageTime]]:
        """Return what each layer of each stage takes and holds, in the order in which they run."""
        layers = [self._layer(number, split, recompute, tensor_group) for number in range(len(self.profile.layers))]
        return [[layers[number] for number, count in stage for _ in range(count)] for stage in self._cut(stages)]

    def _cut(self, stages: int) -> list[_Cut]:
        if stages not in self._cuts:
            cut = cut_into_stages(self.profile, stages)
            self._cuts[stages] = [
                tuple((self._number[id(layer)], count) for layer, count in stage.layers) for stage in cut
            ]
        return self._cuts[stages]

    def _layer(self, number: int, split: Split, recompute: str, group: Group) -> StageTime:
        layer, cost = self.profile.layers[number], self._costs[number]
        passes = cost.passes(split, recompute)
        compute_s = sum(each.seconds(self.rates) for each in passes)
        sums = self._sums(number, layer, recompute) if split.tensor > 1 else ((0, 0),) * 3
        forward_s, again_s, backward_s = (
            self._with_messages(each, times, group.all_reduce_s(size * split.ratio) if times else 0.0)
            for each, (times, size) in zip(passes, sums, strict=True)
        )
        whole = cost.whole(split.tensor)
        return StageTime(
            forward_s, again_s, backward_s,
            compute_s=compute_s,
            summed_bytes=sum(times * size for times, size in sums) * split.ratio,
            layers=1,
            parameters=whole * layer.parameters,
            parameter_bytes=whole * layer.parameter_bytes,
            gradient_bytes=whole * layer.gradient_bytes,
        )  # fmt: skip

    def _sums(self, number: int, layer: Layer, recompute: str) -> tuple[tuple[int, int], ...]:
        """Return how often a layer sums how many bytes over the tensor group: forward, again, backward."""
        again = layer.pairs if layer.block and recompute == "full" else 0
        input_bytes = self.profile.layers[number - 1].output_bytes if number else self.profile.input_bytes
        if layer.repeats > 1:
            input_bytes = layer.output_bytes
        return (layer.pairs, layer.output_bytes), (again, layer.output_bytes), (layer.pairs, input_bytes)

    def _with_messages(self, own: PassTime, times: int, sum_s: float) -> float:
        start_s = own.start_s + times * EXCHANGE_OPERATIONS * self.rates.operation_s
        return PassTime(own.work_s, start_s).seconds(self.rates, times * sum_s)


def _sum(layers: list[StageTime], stage: _Cut) -> StageTime:
    total = StageTime()
    for number, count in stage:
        total = total.add(layers[number], count)
    return total


def _pipeline(stages: list[StageTime]) -> Pipeline:
    slowest = max(stages, key=lambda stage: stage.seconds)
    others_s = sum(stage.seconds for stage in stages) - slowest.seconds
    return Pipeline(slowest, max(0.0, others_s), (stages[0],) if len(stages) == 1 else (stages[0], stages[-1]))

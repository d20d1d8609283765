"""How long the stages of a pipeline take over one micro-batch: the layers of each, with the messages inside them.

A layer with pairs sums its output over the tensor group in the forward, once for each pair, and the gradient of its
input in the backward; computing it again sums its output again. The worker waits for each of these sums. Divided by
tokens (`Plan.sequence`), a block scatters each sum and gathers it before the next pair: two messages of half its bytes.
"""

from typing import NamedTuple, TypeAlias

from shoal.planner.stages import cut_into_stages
from shoal.planner.time.compute import EXCHANGE_OPERATIONS, LayerCost, PassTime, Rates, Split
from shoal.planner.time.traffic import Group
from shoal.spec.plan import Plan
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
    different: tuple[StageTime, ...]
    """Those that are not alike, each once: any of them may hold the most."""


class Pieces(NamedTuple):
    """How a model is cut: into stages of so many pieces each, at certain layers if these are given."""

    stages: int
    chunks: int = 1
    starts: tuple[str, ...] = ()


def pieces_of(plan: Plan) -> Pieces:
    """Return how `plan` cuts the model."""
    return Pieces(plan.mesh.pipeline, plan.chunks, plan.stages)


_Cut: TypeAlias = tuple[tuple[int, int], ...]
"""A stage by the numbers of its layers, each with how often it is there."""


class StageTimes:
    """The layers of a profile on a worker with certain rates; each way to split them is worked out once."""

    def __init__(self, profile: Profile, rates: Rates) -> None:
        self.profile, self.rates = profile, rates
        self._costs = [LayerCost(layer, profile, rates) for layer in profile.layers]
        self._number = {id(layer): number for number, layer in enumerate(profile.layers)}
        self._cuts: dict[Pieces, list[_Cut]] = {}
        self._taken: dict[tuple[Split, str], list[StageTime]] = {}
        self._known: dict[tuple[Pieces, Split, str], Pipeline] = {}

    def pipeline(self, pieces: Pieces, split: Split, recompute: str, tensor_group: Group) -> Pipeline:
        """Return the stages of a pipeline whose workers take `split` of each layer."""
        key = (pieces, split, recompute)
        if key not in self._known:
            layers, cut = self._layers(split, recompute, tensor_group), self._cut(pieces)
            different = {stage: _sum(layers, stage) for stage in dict.fromkeys(cut)}
            self._known[key] = _pipeline([different[stage] for stage in cut], tuple(different.values()))
        return self._known[key]

    def layers_of_pieces(
        self, pieces: Pieces, split: Split, recompute: str, tensor_group: Group
    ) -> list[list[StageTime]]:
        """Return what each layer of each piece takes and holds, in the order in which they run."""
        layers = self._layers(split, recompute, tensor_group)
        alone = Pieces(pieces.stages * pieces.chunks, 1, pieces.starts)
        return [[layers[number] for number, count in piece for _ in range(count)] for piece in self._cut(alone)]

    def _cut(self, pieces: Pieces) -> list[_Cut]:
        if pieces not in self._cuts:
            cut = cut_into_stages(self.profile, pieces.stages, chunks=pieces.chunks, starts=pieces.starts)
            self._cuts[pieces] = [
                tuple((self._number[id(layer)], count) for layer, count in stage.layers) for stage in cut
            ]
        return self._cuts[pieces]

    def _layers(self, split: Split, recompute: str, group: Group) -> list[StageTime]:
        key = (split, recompute)
        if key not in self._taken:
            self._taken[key] = [
                self._layer(number, split, recompute, group) for number in range(len(self.profile.layers))
            ]
        return self._taken[key]

    def _layer(self, number: int, split: Split, recompute: str, group: Group) -> StageTime:
        layer, cost = self.profile.layers[number], self._costs[number]
        passes = cost.passes(split, recompute)
        compute_s = sum(each.seconds(self.rates) for each in passes)
        sums = self._sums(number, layer, recompute) if layer.degree(split.tensor) > 1 else ((0, 0),) * 3
        starts = EXCHANGE_OPERATIONS * (2 if split.sequence and layer.block else 1)  # scattered, and gathered later
        forward_s, again_s, backward_s = (
            self._with_messages(each, times, group.all_reduce_s(size * split.ratio) if times else 0.0, starts)
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
        if layer.vocabulary and not layer.forward.products:  # rows that other workers have come by a sum
            return (1, layer.output_bytes), (0, 0), (0, 0)
        if layer.vocabulary:  # a gather of the output is half of a sum
            return (1, layer.output_bytes // 2), (0, 0), (1, input_bytes)
        return (layer.pairs, layer.output_bytes), (again, layer.output_bytes), (layer.pairs, input_bytes)

    def _with_messages(self, own: PassTime, times: int, sum_s: float, starts: int) -> float:
        start_s = own.start_s + times * starts * self.rates.operation_s
        return PassTime(own.work_s, start_s).seconds(self.rates, times * sum_s)


def _sum(layers: list[StageTime], stage: _Cut) -> StageTime:
    total = StageTime()
    for number, count in stage:
        total = total.add(layers[number], count)
    return total


def _pipeline(stages: list[StageTime], different: tuple[StageTime, ...]) -> Pipeline:
    slowest = max(stages, key=lambda stage: stage.seconds)
    others_s = sum(stage.seconds for stage in stages) - slowest.seconds
    return Pipeline(slowest, max(0.0, others_s), different)

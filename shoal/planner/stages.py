"""The stages of a pipeline: which layers each one holds, so that the longest takes as little as it can.

A model is cut where blocks begin, and other layers with parameters in a Sequential or ModuleList (where it has neither,
in front of any layer but the loss): what runs before the first of them goes with it, what runs after one goes with
that one. With `chunks` pieces a stage, piece k is on stage k % pipeline.

1. A layer costs its operations, and 160 more for each byte that it moves (13 in float32), forward and backward. That is
   what the middle device of the catalog computes while it moves a byte. Not seconds: memory is predicted without a
   machine and the workers cut without one, and all must come to the same cut.
2. The least length of the longest piece is found by bisection: a length is enough if filling one piece after the other
   up to it takes no more pieces than there are. Both ends move on to lengths that pieces can really have, so a few
   steps do.
3. Among all cuts with that longest piece: from the last piece to the first, each takes what reaches an even share of
   what is left, if the longest allows it. So where pieces must differ, the later ones have more: a stage in front
   holds more micro-batches at once.

Example: 10 equal blocks over 4 stages: the longest has 3, so 2, 2, 3, 3. With a head as long as two blocks behind them
12 are to be dealt out: 3, 3, 3, and 1 with the head.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter, OrderedDict
from dataclasses import dataclass

from shoal.core.errors import PlanError, did_you_mean
from shoal.spec.profile import Layer, Profile

FLOPS_PER_BYTE = {"fp32": 13, "bf16": 160}
"""Operations that count as much as moving a byte: the median over catalog/devices, 2026-11, of the rate of large
products over that of memory. Between 7 and 18 in float32 on all but gaming cards, and 100 and 330 in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The layers of one stage, each with how often it is there."""

    index: int
    layers: tuple[tuple[Layer, int], ...]


def cut_into_stages(profile: Profile, stages: int, *, chunks: int = 1, starts: tuple[str, ...] = ()) -> list[Stage]:
    """Return `stages` stages of `chunks` pieces each, which together hold every layer of `profile`, in order.

    `starts` names the layers with which the second, third, ... piece begins, for a cut that is given.
    """
    if stages == 1:
        return [Stage(index=0, layers=tuple((layer, layer.repeats) for layer in profile.layers))]
    return _cuts_of(profile).stages(stages, chunks, starts)


def fullest_stages(profile: Profile, stages: int, *, chunks: int = 1, starts: tuple[str, ...] = ()) -> list[Stage]:
    """Return those of the stages that no stage before them holds all the layers of.

    One of them needs the most memory: a stage before has at least as many micro-batches in flight.
    """
    if stages == 1:
        return cut_into_stages(profile, stages)
    return _cuts_of(profile).fullest(stages, chunks, starts)


def block_counts(profile: Profile, pieces: int) -> tuple[int, ...]:
    """Return how many blocks each of `pieces` pieces has, of those that `most_pieces` counts."""
    return _cuts_of(profile).counts(pieces)


def piece_starts(profile: Profile, pieces: int) -> tuple[str, ...]:
    """Return the names of the layers with which the second, third, ... of `pieces` pieces begins."""
    cuts = _cuts_of(profile)
    return tuple(cuts.name_of(end) for end in list(itertools.accumulate(cuts.counts(pieces)))[:-1])


def longest_piece(profile: Profile, pieces: int) -> int:
    """Return the cost of the longest of `pieces` pieces, in operations."""
    return _cuts_of(profile).longest(pieces)


def most_pieces(profile: Profile) -> int:
    """Return into how many pieces a pipeline can cut the model."""
    return len(_cuts_of(profile).begins)


_KEPT = 64
"""How many profiles stay prepared: a calibration has some tens of models."""
_prepared: "OrderedDict[int, _Cuts]" = OrderedDict()


def _cuts_of(profile: Profile) -> "_Cuts":
    # By identity: hashing a profile takes longer than cutting it. What is kept holds it, so no id comes again.
    found = _prepared.get(id(profile))
    if found is None:
        found = _prepared[id(profile)] = _Cuts(profile)
        if len(_prepared) > _KEPT:
            _prepared.popitem(last=False)
    return found


class _Cuts:
    """A profile that is cut into pieces; each number of them is worked out once."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.layers = [layer for layer in profile.layers for _ in range(layer.repeats)]
        self.begins = _places(self.layers)
        """The number of the layer with which each block begins, one behind the other."""
        costs = [_cost(layer, FLOPS_PER_BYTE[profile.products_in]) for layer in self.layers]
        firsts = [0, *self.begins[1:], len(self.layers)]
        blocks = [sum(costs[first:end]) + 1 for first, end in itertools.pairwise(firsts)]  # 1: none costs nothing
        self.before = list(itertools.accumulate(blocks, initial=0))
        """What all blocks before each one cost."""
        self.heaviest = max(blocks)
        self._longest: dict[int, int] = {}
        self._counts: dict[int, tuple[int, ...]] = {}
        self._stages: dict[tuple[int, int, tuple[str, ...]], list[Stage]] = {}
        self._fullest: dict[tuple[int, int, tuple[str, ...]], list[Stage]] = {}

    def stages(self, stages: int, chunks: int, starts: tuple[str, ...]) -> list[Stage]:
        key = (stages, chunks, starts)
        if key not in self._stages:
            ends = list(itertools.accumulate(self.counts(stages * chunks)))[:-1]
            begins = self.places(starts) if starts else [self.begins[end] for end in ends]
            cuts = [0, *begins, len(self.layers)]
            pieces = [self.layers[first:end] for first, end in itertools.pairwise(cuts)]
            held = [[layer for piece in pieces[stage::stages] for layer in piece] for stage in range(stages)]
            self._stages[key] = [Stage(index=index, layers=_counted(layers)) for index, layers in enumerate(held)]
        return self._stages[key]

    def fullest(self, stages: int, chunks: int, starts: tuple[str, ...]) -> list[Stage]:
        key = (stages, chunks, starts)
        if key not in self._fullest:
            found: list[tuple[Stage, Counter[int]]] = []
            for stage in self.stages(*key):
                held = Counter({id(layer): count for layer, count in stage.layers})
                if not any(held <= more for _, more in found):
                    found.append((stage, held))
            self._fullest[key] = [stage for stage, _ in found]
        return self._fullest[key]

    def counts(self, pieces: int) -> tuple[int, ...]:
        """Return the blocks of each piece."""
        if pieces > len(self.begins):
            raise PlanError(
                f"pipeline={pieces}: the model has {len(self.begins)} layers to cut. Use at most {len(self.begins)}."
            )
        if pieces not in self._counts:
            self._counts[pieces] = self._by_count(pieces) if self.profile.cut_by_count else self._by_cost(pieces)
        return self._counts[pieces]

    def longest(self, pieces: int) -> int:
        """Return the least that the longest piece can cost."""
        if pieces not in self._longest:
            low = max(self.heaviest, -(-self.before[-1] // pieces))
            high = self.before[-1]
            while low < high:
                limit = (low + high) // 2
                enough, found = self._fill(limit, pieces)
                low, high = (low, found) if enough else (found, high)
            self._longest[pieces] = low
        return self._longest[pieces]

    def name_of(self, block: int) -> str:
        """Return the name of a block. A profile has that of the first of equal ones, which are numbered."""
        place = self.begins[block]
        layer = self.layers[place]
        behind = place - next(number for number, other in enumerate(self.layers) if other is layer)
        path, _, number = layer.name.rpartition(".")
        if behind == 0 or not number.isdigit():
            return layer.name
        return f"{path}.{int(number) + behind}".removeprefix(".")

    def places(self, names: tuple[str, ...]) -> list[int]:
        """Return the numbers of the layers with these names, which must come one after the other."""
        known = {self.name_of(block): self.begins[block] for block in range(len(self.begins))}
        for name in names:
            if name not in known:
                raise PlanError(f"stages names {name!r}, which is no layer to cut at.{did_you_mean(name, list(known))}")
        found = [known[name] for name in names]
        if any(first >= second for first, second in itertools.pairwise([0, *found])):
            raise PlanError(f"stages={list(names)}: name each piece's first layer, in the order in which they run.")
        return found

    def _fill(self, limit: int, pieces: int) -> tuple[bool, int]:
        """Return whether pieces of up to `limit` are enough, and the longest of them; else the next limit to try."""
        before, begin, most, following = self.before, 0, 0, self.before[-1]
        for _ in range(pieces):
            end = bisect_right(before, before[begin] + limit) - 1
            most = max(most, before[end] - before[begin])
            if end == len(before) - 1:
                return True, most
            following = min(following, before[end + 1] - before[begin])
            begin = end
        return False, following

    def _by_cost(self, pieces: int) -> tuple[int, ...]:
        before, longest = self.before, self.longest(pieces)
        reach = [0]
        """How far the first k pieces can reach: the others must hold the rest."""
        for _ in range(pieces - 1):
            reach.append(bisect_right(before, before[reach[-1]] + longest) - 1)
        ends = [len(before) - 1]
        for piece in range(pieces - 1, 0, -1):
            end = ends[-1]
            share = -(-before[end] // (piece + 1))
            begin = bisect_right(before, before[end] - share) - 1
            begin = max(begin, bisect_left(before, before[end] - longest), piece)
            ends.append(min(begin, reach[piece], end - 1))
        return tuple(end - begin for begin, end in itertools.pairwise([0, *reversed(ends)]))

    def _by_count(self, pieces: int) -> tuple[int, ...]:
        share, more = divmod(len(self.begins), pieces)
        return tuple(share + (piece < more) for piece in range(pieces))


def _cost(layer: Layer, flops_per_byte: int) -> int:
    passes = (layer.forward, layer.backward)
    return sum(math.ceil(each.flops) + flops_per_byte * math.ceil(each.moved_bytes) for each in passes)


def _places(layers: list[Layer]) -> list[int]:
    """Return the numbers of the layers with which a piece may begin: blocks, and others of a list that train."""
    places = [number for number, layer in enumerate(layers) if layer.block or (_is_listed(layer) and layer.parameters)]
    if places:
        return places
    # The loss is no module, and nothing can be cut in front of it.
    has_loss = len(layers) > 1 and layers[-1].name == "loss" and not layers[-1].kind
    return list(range(len(layers) - has_loss))


def _is_listed(layer: Layer) -> bool:
    """Return whether it stands in a Sequential or a ModuleList, which number what they hold."""
    return layer.name.rpartition(".")[2].isdigit()


def _counted(layers: list[Layer]) -> tuple[tuple[Layer, int], ...]:
    out: list[tuple[Layer, int]] = []
    for layer in layers:
        if out and out[-1][0] is layer:
            out[-1] = layer, out[-1][1] + 1
        else:
            out.append((layer, 1))
    return tuple(out)

"""The stages of a pipeline: which layers each one holds.

What runs before the first block goes to the first stage, what runs after the last to the last; the blocks between are
dealt out as evenly as their number allows, one more to the first stages where it does not divide.
"""

import itertools
from dataclasses import dataclass

from shoal.core.errors import PlanError
from shoal.spec.profile import Layer, Profile


@dataclass(frozen=True, kw_only=True)
class Stage:
    """The layers of one stage, each with how often it is there."""

    index: int
    layers: tuple[tuple[Layer, int], ...]


def cut_into_stages(profile: Profile, stages: int) -> list[Stage]:
    """Return `stages` stages that together hold every layer of `profile`, in order."""
    if stages == 1:
        return [Stage(index=0, layers=tuple((layer, layer.repeats) for layer in profile.layers))]
    single = [layer for layer in profile.layers for _ in range(layer.repeats)]
    blocks = [index for index, layer in enumerate(single) if layer.block] or list(range(len(single)))
    if stages > len(blocks):
        raise PlanError(f"pipeline={stages}: the model has {len(blocks)} layers to cut. Use at most {len(blocks)}.")
    share, more = divmod(len(blocks), stages)
    ends = [blocks[share * (stage + 1) + min(stage + 1, more) - 1] + 1 for stage in range(stages - 1)]
    cuts = [0, *ends, len(single)]
    return [Stage(index=i, layers=_counted(single[a:b])) for i, (a, b) in enumerate(itertools.pairwise(cuts))]


def _counted(layers: list[Layer]) -> tuple[tuple[Layer, int], ...]:
    out: list[tuple[Layer, int]] = []
    for layer in layers:
        if out and out[-1][0] is layer:
            out[-1] = layer, out[-1][1] + 1
        else:
            out.append((layer, 1))
    return tuple(out)

"""What was measured nearby: how far a step's time lies from the arithmetic where similar plans were measured.

The arithmetic of `steptime` has a handful of constants; what a library does at one shape of a layer, or a network at
one layout, it cannot know. So calibration keeps what remained at the measured plans, and a prediction is multiplied by

    exp(sum over anchors of weight * exp(-distance^2 / 2))

where the distance counts octaves of a layer's operations per sample, of tensor, pipeline and micro-batch, each over its
own scale. Far from everything measured the factor is 1. The weights are those of Gaussian-process regression
(`calibrate`), which believes a single row a little and several that agree a lot.

Example: one anchor at tensor=2 with weight 0.1. At tensor=2 a prediction grows by exp(0.1) = 1.11; at tensor=4, one
octave or two scales away, by exp(0.1 * exp(-2)) = 1.014; at tensor=8 by 1.00003.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shoal.spec.profile import Profile

OCTAVES = (2.0, 0.5, 1.0, 1.0)
"""How far what was measured reaches, in octaves of layer_flops, tensor, pipeline and micro_batch.

Chosen by 5-fold cross-validation on the public A100 measurements of docs/accuracy.md, 2026-11; factors of 0.5 and 2 for
any of them change the error by a tenth of itself. Operations grow with the square of a model's width: 2 is one of it.
"""


class Place(NamedTuple):
    """Where a plan lies among others, each coordinate in octaves over its scale."""

    layer_flops: float
    tensor: float
    pipeline: float
    micro_batch: float


def layer_flops_of(profile: Profile) -> float:
    """Return the operations of a forward of one sample through the layer that repeats most often."""
    layer = max(profile.layers, key=lambda layer: layer.repeats * layer.forward.flops)
    return max(1.0, layer.forward.flops / profile.micro_batch)


def place_of(layer_flops: float, *, tensor: int, pipeline: int, micro_batch: float) -> Place:
    """Return where a plan lies."""
    values = (layer_flops, tensor, pipeline, micro_batch)
    return Place(*(math.log2(value) / scale for value, scale in zip(values, OCTAVES, strict=True)))


def likeness(one: Place, other: Place) -> float:
    """Return how much two places have in common: 1 for the same, near 0 a few scales apart."""
    return math.exp(-0.5 * sum((a - b) ** 2 for a, b in zip(one, other, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A place where steps were measured, and what it adds to the logarithm of a prediction there."""

    layer_flops: float
    tensor: int
    pipeline: int
    micro_batch: int
    weight: float

    @cached_property
    def place(self) -> Place:
        """Where it lies."""
        return place_of(self.layer_flops, tensor=self.tensor, pipeline=self.pipeline, micro_batch=self.micro_batch)


@dataclass(frozen=True)
class Nearby:
    """All anchors of a calibration."""

    anchors: tuple[Anchor, ...]

    def factor(self, layer_flops: float, *, tensor: int, pipeline: int, micro_batch: float) -> float:
        """Return what to multiply a predicted step time with."""
        here = place_of(layer_flops, tensor=tensor, pipeline=pipeline, micro_batch=micro_batch)
        return math.exp(math.fsum(anchor.weight * likeness(here, anchor.place) for anchor in self.anchors))

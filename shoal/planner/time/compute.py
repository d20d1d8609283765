"""How long a layer's forward and backward take on one worker: formulas 1 to 4 of docs/planner-model.md.

1. A product of f operations takes f / rate + half_s, at least its bytes / memory rate: half_s is what lets small
   products reach only a part of the rate.
2. All else takes its bytes / memory rate. While micro-batches accumulate, a gradient is read, read and written.
3. Tensor parallelism divides the products of layers that have pairs, and that part of the rest which is split; by
   tokens (`Plan.sequence`), all of the rest in blocks.
4. A device that works through a queue takes the longer of work and starts; a processor takes both.

Example: 10 products of 20 GFLOP at 200 TFLOP/s with half_s = 10 us, 300 MB at 1.5 TB/s, 60 operations of 10 us:
work 1.1 + 0.2 ms, starts 0.6 ms: 1.3 ms. Over 4 workers with nothing left whole, 0.35 + 0.05 ms: the starts count.
"""

from dataclasses import dataclass
from typing import NamedTuple

from shoal.planner.machine import Machine
from shoal.spec.profile import Layer, Pass, Profile

EXCHANGE_OPERATIONS = 3
"""Operations that an all-reduce inside a layer starts: to the other stream, itself, and back."""
ACCUMULATE_MOVES = 3
"""The bytes of a gradient that adding one to it moves: two reads, one write."""
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one worker has of its device."""

    flops_per_s: float
    """That the largest products reach."""
    half_s: float
    """What a product takes beside its operations: at `half_rate_flops` as much as they do."""
    memory_bytes_per_s: float
    update_bytes_per_s: float
    operation_s: float
    queued: bool
    """Whether operations are started ahead while others run."""


def rates_of(machine: Machine, precision: str, *, neighbours: int) -> Rates:
    """Return the rates of one of `neighbours` workers on a node."""
    device = machine.device
    crowd = neighbours if machine.shared else 1
    peak = device.bf16_matmul_flops_per_s if precision == "bf16" else device.matmul_flops_per_s
    flops_per_s = peak * device.matmul_fraction / crowd
    fastest = max(device.matmul_flops_per_s, device.bf16_matmul_flops_per_s) * device.matmul_fraction / crowd
    return Rates(
        flops_per_s=flops_per_s,
        half_s=device.half_rate_flops / fastest,
        memory_bytes_per_s=device.memory_bytes_per_s / crowd,
        update_bytes_per_s=(device.update_bytes_per_s or device.memory_bytes_per_s) / crowd,
        operation_s=device.operation_s,
        queued=not machine.shared,
    )


class Split(NamedTuple):
    """A worker's part: how many times the traced micro-batch it takes, with how many others it computes a layer."""

    ratio: float
    tensor: int
    accumulates: bool
    sequence: bool = False
    """Whether what lies between a block's pairs is divided as well, by tokens."""


class PassTime(NamedTuple):
    """One pass of a layer: what its work takes, and the starts of its operations."""

    work_s: float
    start_s: float

    def seconds(self, rates: Rates, exchange_s: float = 0.0) -> float:
        """Return how long it takes with `exchange_s` of messages that it must wait for."""
        if rates.queued:
            return max(self.work_s + exchange_s, self.start_s)
        return self.work_s + exchange_s + self.start_s


NOTHING = PassTime(0.0, 0.0)


class LayerCost:
    """What one layer costs at the traced micro-batch, prepared so that a `Split` of it is a few operations."""

    def __init__(self, layer: Layer, profile: Profile, rates: Rates) -> None:
        element_bytes = _ELEMENT_BYTES[profile.products_in]
        self.degree = layer.degree
        self.block = layer.block
        self.divided_parameters = layer.split_parameters / layer.parameters if layer.parameters else 0.0
        self.divided_saved = layer.split_saved_bytes / layer.saved_bytes if layer.saved_bytes else 0.0
        self.forward = _Cost(layer.forward, rates, element_bytes)
        self.backward = _Cost(layer.backward, rates, element_bytes)
        self.accumulate_s = ACCUMULATE_MOVES * layer.gradient_bytes / rates.memory_bytes_per_s

    def whole(self, tensor: int) -> float:
        """Return what is left on each worker of the layer's parameters, their gradients and state."""
        return 1 - (1 - 1 / self.degree(tensor)) * self.divided_parameters

    def passes(self, split: Split, recompute: str) -> tuple[PassTime, PassTime, PassTime]:
        """Return the forward, what the backward computes again, and the backward itself."""
        tensor = self.degree(split.tensor)
        divided_saved = 1.0 if split.sequence and self.block else self.divided_saved
        kept = split.ratio * (1 - (1 - 1 / tensor) * divided_saved)
        divided = split.ratio / tensor
        forward = self.forward.at(divided, kept)
        backward = self.backward.at(divided, kept)
        if split.accumulates:
            backward = PassTime(backward.work_s + self.accumulate_s * self.whole(tensor), backward.start_s)
        again = NOTHING
        if self.block and recompute == "full":
            again = forward
        elif self.block and recompute == "selective":
            again = PassTime(self.forward.moved_s * kept, self.forward.other_start_s)
        return forward, again, backward


class _Cost:
    """One pass in seconds: what divides with products, what with the rest, and what stays."""

    def __init__(self, record: Pass, rates: Rates, element_bytes: int) -> None:
        product_flops = products = 0
        self.products_s = 0.0
        for product in record.products:
            moved = product.rows * product.inner + product.inner * product.columns + product.rows * product.columns
            moved_s = element_bytes * product.batch * moved / rates.memory_bytes_per_s
            self.products_s += product.count * max(product.flops / rates.flops_per_s, moved_s)
            product_flops += product.count * product.flops
            products += product.count
        self.products_s += max(0, record.flops - product_flops) / rates.flops_per_s
        self.fixed_s = products * rates.half_s
        self.moved_s = record.moved_bytes / rates.memory_bytes_per_s
        self.start_s = record.operations * rates.operation_s
        self.other_start_s = max(0, record.operations - products) * rates.operation_s

    def at(self, divided: float, kept: float) -> PassTime:
        return PassTime(self.products_s * divided + self.fixed_s + self.moved_s * kept, self.start_s)

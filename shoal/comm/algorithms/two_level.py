"""In two levels: inside each host by whatever is fastest there, and between hosts a slice for each worker.

1. Inside: a reduce-scatter. Worker k of the g of a host then has the host's sum of slice k.
2. Between: an all-reduce of slice k among the workers k of all hosts; the g slices go at the same time.
3. Inside: an all-gather.

Each host sends 2 (h-1)/h of the bytes to the others, for h hosts, where a ring that knows no hosts may send g times it.
Example: 2 hosts of 4, 100 MB. Inside, each worker ends with the sum of 25 MB over its host; 25 MB of each worker are
summed with that of one worker of the other host; inside, the four slices are put together.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from shoal.comm.algorithms.halving_doubling import halving_doubling
from shoal.comm.algorithms.ring import ring_all_gather, ring_reduce_scatter
from shoal.comm.algorithms.steps import part
from shoal.comm.algorithms.wire import Wire
from shoal.core.errors import PlanError

AllReduce: TypeAlias = Callable[[Tensor, Wire], None]


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The workers of one host: `index` of `count`, and what they do, in place, on a row of numbers."""

    index: int
    count: int
    reduce_scatter: Callable[[Tensor], None]
    """Puts the sum of part `index` (see `steps.part`) in its place."""
    all_gather: Callable[[Tensor], None]
    """Puts part k of worker k in its place, for every k."""


def two_level(tensor: Tensor, wire: Wire) -> None:
    """Sum `tensor` over all workers, in place: a ring inside each of `wire.hosts`, halves between them.

    Called by every worker; if one is gone, raises PeerLost. Every host must have as many workers.
    """
    inside, between = levels(wire)
    two_level_with(tensor, wire, inside=over_wire(inside), between=between)


def two_level_with(
    tensor: Tensor, wire: Wire, *, inside: Inside, between: Wire, all_reduce: AllReduce = halving_doubling
) -> None:
    """Sum `tensor` over all workers, in place; `between` joins those with the same number in their host.

    Called by every worker; if one is gone, raises PeerLost or what `inside` raises; `tensor` is then undefined.
    """
    with wire.carried(tensor) as numbers:
        inside.reduce_scatter(numbers)
        begin, end = part(numbers.numel(), inside.index, inside.count)
        all_reduce(numbers[begin:end], between)
        inside.all_gather(numbers)


def levels(wire: Wire) -> tuple[Wire, Wire]:
    """Return the wire among the workers of this one's host, and that among those of its number on every host."""
    by_host: dict[str, list[int]] = {}
    for worker, host in enumerate(wire.hosts):
        by_host.setdefault(host, []).append(worker)
    counts = {host: len(workers) for host, workers in by_host.items()}
    if len(set(counts.values())) > 1:
        listed = ", ".join(f"{count} on {host}" for host, count in counts.items())
        raise PlanError(f"two-level needs as many workers on every host, but there are {listed}. Use ring instead.")
    neighbours = by_host[wire.hosts[wire.index]]
    number = neighbours.index(wire.index)
    return wire.among(neighbours), wire.among([workers[number] for workers in by_host.values()])


def over_wire(wire: Wire) -> Inside:
    """Return the workers of `wire`, as a ring."""
    return Inside(
        index=wire.index,
        count=wire.count,
        reduce_scatter=lambda numbers: ring_reduce_scatter(numbers, wire),
        all_gather=lambda numbers: ring_all_gather(numbers, wire),
    )

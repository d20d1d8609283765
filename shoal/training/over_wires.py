"""Gradients over point-to-point messages: by the algorithm that the links make the fastest, on a thread of its own.

Where hosts have several workers, these meet in shared memory first, and slices travel between hosts.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed import PrefixStore, Store

from shoal.comm.algorithms import ALL_REDUCE, Inside, Wire
from shoal.comm.algorithms.shared_inside import over_shared
from shoal.comm.algorithms.two_level import levels, two_level_with
from shoal.comm.group import new_group
from shoal.comm.link import agree_least, can_share_memory, link_from, time_inside
from shoal.comm.shm.group import SharedGroup, join
from shoal.comm.traffic import TRAFFIC
from shoal.planner.collectives.choice import choose_way
from shoal.spec.communication import Communication
from shoal.spec.device import Link
from shoal.spec.plan import Plan
from shoal.training.links import Place

_SHARED_S = 0.2
_SHARED_SIZES = (4 << 10, 4 << 20)
"""How long, and with how many bytes, the memory of a host is measured: there is little that could make it vary."""


class OverWires(NamedTuple):
    """How gradients meet over messages."""

    communication: Communication
    exchange: Callable[[torch.Tensor], None]
    """Sums a tensor over all workers."""
    neighbours: SharedGroup | None
    """The workers of this host, where they are the inner of two levels."""
    bucket_s: float | None
    """What a bucket takes by the way that was chosen."""


def open_wires(plan: Plan, place: Place, store: Store) -> OverWires:
    """Return how gradients meet by the plan's way, or by that which the links make the fastest. By every worker."""
    rank, slow = place.rank, place.slowest
    wire = Wire(new_group(), hosts=place.hosts, watch=place.watch)
    per_host = rank.local_workers if len(set(map(place.hosts.count, place.hosts))) == 1 else 1
    neighbours = _join_neighbours(plan, place, store) if _meet_inside(plan, per_host, place.device) else None
    inside = over_shared(neighbours) if neighbours is not None else None
    copied = _copied_link(neighbours, inside) if neighbours is not None and inside is not None else None
    way = choose_way(
        workers=rank.workers,
        per_host=per_host,
        inside=copied or place.links.inside,
        between=slow,
        bucket=plan.sync.bucket_bytes,
    )
    name = way.name if plan.sync.way == "auto" else plan.sync.way
    if neighbours is not None and name != "two-level":
        neighbours.close()
        neighbours = inside = None
    why = way.reason() if plan.sync.way == "auto" else "the plan says so"
    return OverWires(
        Communication(way=name, why=why, bucket_bytes=way.bucket_bytes, copied=copied),
        _noted(name, _exchange(name, wire, inside)),
        neighbours,
        way.seconds.get(name),
    )


def _exchange(name: str, wire: Wire, inside: Inside | None) -> Callable[[torch.Tensor], None]:
    """Return what sums a tensor by the algorithm `name`, or in two levels with the workers of a host as `inside`."""
    if inside is None:
        all_reduce = ALL_REDUCE[name]
        return lambda tensor: all_reduce(tensor, wire)
    _, between = levels(wire)
    return lambda tensor: two_level_with(tensor, wire, inside=inside, between=between)


def _noted(name: str, exchange: Callable[[torch.Tensor], None]) -> Callable[[torch.Tensor], None]:
    """Return `exchange`, whose calls are noted under `name`."""

    def noted(tensor: torch.Tensor) -> None:
        with TRAFFIC.timing("all-reduce", name, tensor):
            exchange(tensor)

    return noted


def _meet_inside(plan: Plan, per_host: int, device: torch.device) -> bool:
    """Return whether workers of a host can meet in its memory, as the inner of two levels; the same on all hosts."""
    return per_host > 1 and plan.sync.way in ("auto", "two-level") and can_share_memory(device)


def _join_neighbours(plan: Plan, place: Place, store: Store) -> SharedGroup:
    """Return the workers of this one's host. Called by every worker."""
    index = place.rank.index
    numbers = [worker for worker, host in enumerate(place.hosts) if host == place.hosts[index]]
    own = PrefixStore(f"host of worker {numbers[0]}", store)
    return join(own, index=numbers.index(index), count=len(numbers), timeout_s=plan.timeout_s, numbers=numbers)


def _copied_link(neighbours: SharedGroup, inside: Inside) -> Link:
    """Return what copying through a host's memory takes, on the slowest host. Called by every worker."""
    times = time_inside(neighbours, inside, seconds=_SHARED_S, sizes=_SHARED_SIZES)
    # Not shared among more than the two that a link joins: all of them were at it when it was measured.
    link = link_from(times, workers=neighbours.count, shared=False, source="measured inside each host, in its memory")
    return dataclasses.replace(
        link, bytes_per_s=agree_least(link.bytes_per_s), latency_s=-agree_least(-link.latency_s), overlaps=False
    )

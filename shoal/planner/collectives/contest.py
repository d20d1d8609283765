"""Contests: what every algorithm of a collective costs on one link, who wins, and who would win at other sizes."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict

from shoal.planner.collectives import allreduce, broadcast
from shoal.planner.collectives.allreduce import ALLREDUCE, Algorithm, Cost
from shoal.planner.collectives.winners import fastest, winners_by_size
from shoal.spec.device import Link


@dataclass(frozen=True, kw_only=True)
class Contest:
    """What each algorithm costs, and who wins."""

    collective: str
    num_bytes: float
    workers: int
    link: Link
    ideal: Cost
    costs: dict[str, Cost]
    by_size: list[tuple[float, str]]
    """From which size on which algorithm wins; empty where one worker has nothing to send."""
    details: dict[str, Any] = field(default_factory=dict)
    """What else was asked or found: servers, workers in a node, chunks."""

    @property
    def winner(self) -> str | None:
        """The fastest, unless there is nothing to send."""
        return fastest(self.costs) if self.workers > 1 else None

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        costs = {"ideal": self.ideal} | self.costs
        return {
            "collective": self.collective,
            "bytes": self.num_bytes,
            "workers": self.workers,
            "link_bytes_per_s": self.link.bytes_per_s,
            "latency_s": self.link.latency_s,
            **self.details,
            "algorithms": {name: dataclasses.asdict(cost) for name, cost in costs.items()},
            "winner": self.winner,
            "winners_by_size": [{"from_bytes": size, "winner": name} for size, name in self.by_size],
        }


class _Nodes(TypedDict):
    per_node: int
    inside_bytes_per_s: float
    inside_latency_s: float


def allreduce_contest(
    num_bytes: float,
    workers: int,
    link: Link,
    *,
    servers: int = 1,
    per_node: int | None = None,
    inside: Link | None = None,
) -> Contest:
    """Return the contest of all-reduces; without `per_node`, two-level makes groups of its own, all joined by `link`.

    Only two-level knows the nodes: every message of the others counts as one that goes over `link`.
    """
    group = per_node or middle_divisor(workers)
    within = inside or link
    nodes = _Nodes(per_node=group, inside_bytes_per_s=within.bytes_per_s, inside_latency_s=within.latency_s)
    algorithms: dict[str, Algorithm] = {
        **ALLREDUCE,
        "parameter-server": partial(allreduce.parameter_server, servers=servers),
        "two-level": partial(allreduce.two_level, **nodes),
    }
    bound = partial(allreduce.ideal, **nodes) if per_node else allreduce.ideal
    details = {"servers": servers, **nodes}
    return _contest("allreduce", num_bytes, workers, link, ideal=bound, algorithms=algorithms, details=details)


def broadcast_contest(num_bytes: float, workers: int, link: Link) -> Contest:
    """Return the contest of broadcasts; the source is one of the workers."""
    chunks = broadcast.best_chunks(num_bytes, workers, link.bytes_per_s, link.latency_s)
    details = {"chain_chunks": chunks, "chain_chunk_bytes": num_bytes / chunks}
    bound, algorithms = broadcast.ideal_broadcast, broadcast.BROADCAST
    return _contest("broadcast", num_bytes, workers, link, ideal=bound, algorithms=algorithms, details=details)


def middle_divisor(workers: int) -> int:
    """Return the largest divisor of `workers` up to its square root: groups of that many have the fewest steps."""
    return next(count for count in range(math.isqrt(workers), 0, -1) if workers % count == 0)


def _contest(
    collective: str,
    num_bytes: float,
    workers: int,
    link: Link,
    *,
    ideal: Algorithm,
    algorithms: Mapping[str, Algorithm],
    details: dict[str, Any],
) -> Contest:
    where = (workers, link.bytes_per_s, link.latency_s)
    return Contest(
        collective=collective,
        num_bytes=num_bytes,
        workers=workers,
        link=link,
        ideal=ideal(num_bytes, *where),
        costs={name: algorithm(num_bytes, *where) for name, algorithm in algorithms.items()},
        by_size=winners_by_size(algorithms, *where) if workers > 1 else [],
        details=details,
    )

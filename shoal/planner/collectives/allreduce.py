"""What an all-reduce costs, by algorithm: closed forms in the alpha-beta model.

A message of n bytes takes `latency_s + n / link_bytes_per_s`. A worker sends one message and receives one at a time,
both at once if it likes (full duplex, one port). All workers start together, adding numbers is free, and bytes divide
without remainder: a chunk may be a third of a byte. Under these assumptions the forms are exact, as
tests/planner/message_simulation.py shows by sending every message.

With p workers, n bytes, a = latency_s, b = 1 / link_bytes_per_s, lg = log2, q = the largest power of two that is <= p:

    parameter server, k servers   2 max(p, k) (a + n/k b)
    naive                         2 (p-1) (a + n b)
    tree                          2 ceil(lg p) (a + n b)
    ring                          2 (p-1) (a + n/p b)
    halving-doubling              2 ceil(lg p) a + 2 (p-1)/p n b
    recursive doubling            lg q (a + n b)              and, where q < p, 2 (a + n b) to fold the others in
    two-level, g in a node        ring of n bytes among g, then ring of n/g bytes among the p/g nodes
    ideal                         at least ceil(lg p) a, and at least 2 (p-1)/p n b

Example: 100 MB, 64 workers, 1.25 GB/s, 20 us. Ring: 126 * (20 us + 1.25 ms) = 160 ms. Halving-doubling: 12 * 20 us +
2 * 63/64 * 80 ms = 157.7 ms. Ideal: 157.5 ms. At 1 kB recursive doubling wins: 6 * 20.8 us = 125 us; ring 2.52 ms.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cost:
    """What a collective costs."""

    steps: int
    """Messages in turn, from the start to the end."""
    bytes_per_worker: float
    """The bytes that the busiest of them sends."""
    seconds: float
    inside_bytes: float = 0.0
    """Of `bytes_per_worker`, those that stay inside a node; 0 where the algorithm knows no nodes."""


Algorithm = Callable[[float, int, float, float], Cost]
"""Called with num_bytes, workers, link_bytes_per_s, latency_s."""


def ideal(
    num_bytes: float,
    workers: int,
    link_bytes_per_s: float,
    latency_s: float,
    *,
    per_node: int = 1,
    inside_bytes_per_s: float = math.inf,
    inside_latency_s: float = math.inf,
) -> Cost:
    """Return what no all-reduce among the workers can beat: a bound, not an algorithm.

    The workers together send at least 2 (p-1) n bytes (Patarasuk and Yuan, 2009), and so do the nodes; whom a sum
    reaches at most doubles in a step. With `per_node` workers in a node, the bytes that need not leave it go inside.
    """
    all_bytes = 2 * (workers - 1) / workers * num_bytes
    between_bytes = 2 * (workers - per_node) / workers / per_node * num_bytes
    inside_bytes = all_bytes - between_bytes if per_node > 1 else 0.0
    steps = _doublings(workers)
    bandwidth_s = between_bytes / link_bytes_per_s + inside_bytes / max(link_bytes_per_s, inside_bytes_per_s)
    return Cost(steps, all_bytes, max(steps * min(latency_s, inside_latency_s), bandwidth_s), inside_bytes)


def parameter_server(
    num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float, *, servers: int = 1
) -> Cost:
    """Return the cost with the sum on `servers` machines beside the workers, an equal part of it on each.

    Every worker sends each server its part, and when all are sent it fetches the sums. The busiest is a server,
    as long as there are fewer of them than workers.
    """
    rounds = max(workers, servers)
    part_bytes = num_bytes / servers
    return Cost(2 * rounds, rounds * part_bytes, 2 * rounds * (latency_s + part_bytes / link_bytes_per_s))


def naive(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost where all send to one worker, one after the other, and it sends the sum to each."""
    others = workers - 1
    return Cost(2 * others, others * num_bytes, 2 * others * (latency_s + num_bytes / link_bytes_per_s))


def tree(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost of a reduce up a binomial tree and a broadcast down the same tree."""
    depth = _doublings(workers)
    return Cost(2 * depth, depth * num_bytes, 2 * depth * (latency_s + num_bytes / link_bytes_per_s))


def ring(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost of a reduce-scatter and an all-gather around a ring."""
    half = ring_all_gather(num_bytes, workers, link_bytes_per_s, latency_s)
    return Cost(2 * half.steps, 2 * half.bytes_per_worker, 2 * half.seconds)


def halving_doubling(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost of a reduce-scatter by halves and an all-gather by doubling, for any number of workers.

    Parts stand in a circle, and distances come from halving p, rounded up: see comm/algorithms/halving_doubling.py.
    """
    half = doubling_all_gather(num_bytes, workers, link_bytes_per_s, latency_s)
    return Cost(2 * half.steps, 2 * half.bytes_per_worker, 2 * half.seconds)


def recursive_doubling(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost where each exchanges all it has with the worker 1, 2, 4 ... away; the others are folded in."""
    core, folds = _power_of_two(workers)
    exchanges = _doublings(core)
    steps = exchanges + 2 * folds
    return Cost(steps, (exchanges + folds) * num_bytes, steps * (latency_s + num_bytes / link_bytes_per_s))


def two_level(
    num_bytes: float,
    workers: int,
    link_bytes_per_s: float,
    latency_s: float,
    *,
    per_node: int,
    inside_bytes_per_s: float,
    inside_latency_s: float,
) -> Cost:
    """Return the cost of a reduce-scatter inside each node, an all-reduce between nodes and an all-gather inside.

    All three are rings. `per_node` divides `workers`. Each worker has its own link to the other nodes, which carries
    `link_bytes_per_s`; where the workers of a node share one adapter, that is its rate over `per_node`.
    """
    inside = ring(num_bytes, per_node, inside_bytes_per_s, inside_latency_s)
    between = ring(num_bytes / per_node, workers // per_node, link_bytes_per_s, latency_s)
    all_bytes = inside.bytes_per_worker + between.bytes_per_worker
    return Cost(inside.steps + between.steps, all_bytes, inside.seconds + between.seconds, inside.bytes_per_worker)


def ring_all_gather(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost to give every worker all of `num_bytes`, of which each has an equal part, around a ring.

    A reduce-scatter around a ring costs the same: its messages go the same ways.
    """
    part_bytes = num_bytes / workers
    hops = workers - 1
    return Cost(hops, hops * part_bytes, hops * (latency_s + part_bytes / link_bytes_per_s))


def doubling_all_gather(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost of the same in as few steps as can be, for any number of workers (Bruck et al., 1997)."""
    steps = _doublings(workers)
    sent_bytes = (workers - 1) / workers * num_bytes
    return Cost(steps, sent_bytes, steps * latency_s + sent_bytes / link_bytes_per_s)


ALLREDUCE: dict[str, Algorithm] = {
    "parameter-server": parameter_server,
    "naive": naive,
    "tree": tree,
    "ring": ring,
    "halving-doubling": halving_doubling,
    "recursive-doubling": recursive_doubling,
}
"""Those that need to know no more than the link; `two_level` also needs the nodes."""


def _doublings(workers: int) -> int:
    """Return the least k with 2**k >= workers."""
    return (workers - 1).bit_length()


def _power_of_two(workers: int) -> tuple[int, bool]:
    """Return the largest power of two among the workers, and whether any are left over."""
    core = 1 << (workers.bit_length() - 1)
    return core, core < workers

"""What it costs to give every worker what one of them has, by algorithm. The model is that of collectives.py.

With p workers (the source is one of them), n bytes, a = latency_s, b = 1 / link_bytes_per_s:

    one by one               (p-1) (a + n b)
    tree                     ceil(lg p) (a + n b)
    chain in c chunks        (p-2 + c) (a + n/c b)
    scatter and all-gather   (ceil(lg p) + p-1) a + 2 (p-1)/p n b
    ideal                    at least ceil(lg p) a, and at least n b

Example: 5 MB to 8 workers at 1 MB/s and no latency: 35 s one by one, 15 s by a tree, 8.75 s by scatter and all-gather,
5.02 s along a chain. The chain's best number of chunks is about sqrt((p-2) n b / a): more of them fill the chain
sooner, and each costs a latency.
"""

import math

from shoal.planner.collectives.allreduce import Algorithm, Cost, doubling_all_gather, ring_all_gather

LEAST_CHUNK_BYTES = 4096
"""A chain's chunks are no smaller: without a latency the model would have them vanish. One page of memory."""


def ideal_broadcast(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return what no broadcast can beat: a bound, not an algorithm."""
    if workers == 1:
        return Cost(0, 0.0, 0.0)
    steps = (workers - 1).bit_length()
    return Cost(steps, num_bytes, max(steps * latency_s, num_bytes / link_bytes_per_s))


def one_by_one(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost where the source sends to each worker in turn."""
    others = workers - 1
    return Cost(others, others * num_bytes, others * (latency_s + num_bytes / link_bytes_per_s))


def tree_broadcast(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost down a binomial tree: in each step all who have it send it on."""
    depth = (workers - 1).bit_length()
    return Cost(depth, depth * num_bytes, depth * (latency_s + num_bytes / link_bytes_per_s))


def chain(
    num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float, *, chunks: int | None = None
) -> Cost:
    """Return the cost along a chain: each worker sends a chunk on while it receives the next.

    Without `chunks`, the best number of them.
    """
    if workers == 1:
        return Cost(0, 0.0, 0.0)
    count = chunks or best_chunks(num_bytes, workers, link_bytes_per_s, latency_s)
    steps = workers - 2 + count
    return Cost(steps, num_bytes, steps * (latency_s + num_bytes / count / link_bytes_per_s))


def best_chunks(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> int:
    """Return in how many chunks a chain is fastest; none is smaller than LEAST_CHUNK_BYTES."""
    most = max(1, int(num_bytes // LEAST_CHUNK_BYTES))
    if workers <= 2:
        return 1
    if latency_s == 0:
        return most
    root = min(most, max(1.0, math.sqrt((workers - 2) * num_bytes / link_bytes_per_s / latency_s)))
    near = (math.floor(root), math.ceil(root))
    return min(near, key=lambda count: (workers - 2 + count) * (latency_s + num_bytes / count / link_bytes_per_s))


def scatter_all_gather(num_bytes: float, workers: int, link_bytes_per_s: float, latency_s: float) -> Cost:
    """Return the cost where the source deals out parts down a binomial tree, and a ring gathers them everywhere."""
    # A scatter down a binomial tree is the all-gather by doubling, run backwards.
    scatter = doubling_all_gather(num_bytes, workers, link_bytes_per_s, latency_s)
    gather = ring_all_gather(num_bytes, workers, link_bytes_per_s, latency_s)
    sent_bytes = scatter.bytes_per_worker + gather.bytes_per_worker
    return Cost(scatter.steps + gather.steps, sent_bytes, scatter.seconds + gather.seconds)


BROADCAST: dict[str, Algorithm] = {
    "one-by-one": one_by_one,
    "tree": tree_broadcast,
    "chain": chain,
    "scatter-all-gather": scatter_all_gather,
}

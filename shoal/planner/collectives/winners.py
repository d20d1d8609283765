"""Which algorithm wins, and where along an axis (message size, link speed) the answer changes."""

from collections.abc import Callable, Mapping
from typing import TypeVar

from shoal.planner.collectives.allreduce import ALLREDUCE, Algorithm, Cost

T = TypeVar("T")

_PER_DOUBLING = 4
"""How densely an axis is scanned: a winner over less than a quarter of a doubling can be missed."""
_TIE = 1e-9
"""Seconds that differ by less than this fraction are the same, summed in another order."""
LARGEST_BYTES = 2.0**50


def fastest(costs: Mapping[str, Cost]) -> str:
    """Return the name of the fastest; of those that are equally fast, the one with the fewest steps."""
    least_s = min(cost.seconds for cost in costs.values())
    tied = [name for name, cost in costs.items() if cost.seconds <= least_s * (1 + _TIE)]
    return min(tied, key=lambda name: costs[name].steps)


def fastest_allreduce(
    num_bytes: float,
    workers: int,
    link_bytes_per_s: float,
    latency_s: float,
    *,
    algorithms: Mapping[str, Algorithm] = ALLREDUCE,
) -> tuple[str, Cost]:
    """Return the name and the cost of the fastest of `algorithms`."""
    costs = {name: cost(num_bytes, workers, link_bytes_per_s, latency_s) for name, cost in algorithms.items()}
    name = fastest(costs)
    return name, costs[name]


def winners_by_size(
    algorithms: Mapping[str, Algorithm], workers: int, link_bytes_per_s: float, latency_s: float
) -> list[tuple[float, str]]:
    """Return from which message size on which algorithm wins, from 1 byte to LARGEST_BYTES."""

    def winner(num_bytes: float) -> str:
        return fastest_allreduce(num_bytes, workers, link_bytes_per_s, latency_s, algorithms=algorithms)[0]

    return changes(winner, 1.0, LARGEST_BYTES)


def changes(answer: Callable[[float], T], low: float, high: float) -> list[tuple[float, T]]:
    """Return [(low, answer there), (x, answer from x on), ...]: where `answer` changes between `low` and `high`.

    Scans in equal factors, then halves the factor around each change until x is good to one part in a million.
    """
    found, here = [(low, answer(low))], low
    while here < high:
        there = min(high, here * 2 ** (1 / _PER_DOUBLING))
        after = answer(there)
        if after != found[-1][1]:
            found.append((_edge(answer, here, there), after))
        here = there
    return found


def _edge(answer: Callable[[float], T], low: float, high: float) -> float:
    before = answer(low)
    while high / low > 1 + 1e-6:
        middle = (low * high) ** 0.5
        if answer(middle) == before:
            low = middle
        else:
            high = middle
    return high

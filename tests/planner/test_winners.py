"""Who wins where: held against the costs themselves."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.planner.collectives import allreduce
from shoal.planner.collectives.allreduce import ALLREDUCE, Algorithm
from shoal.planner.collectives.winners import changes, fastest, winners_by_size


@settings(max_examples=40, deadline=None)
@given(workers=st.integers(2, 70), rate=st.floats(1e6, 1e12), latency_s=st.floats(1e-7, 1e-2))
def test_between_two_changes_the_winner_is_the_fastest(workers: int, rate: float, latency_s: float) -> None:
    found = winners_by_size(ALLREDUCE, workers, rate, latency_s)
    edges = [size for size, _ in found] + [2.0**50]
    for (low, winner), high in zip(found, edges[1:], strict=True):
        middle = math.sqrt(low * high)
        costs = {name: cost(middle, workers, rate, latency_s) for name, cost in ALLREDUCE.items()}
        assert costs[winner].seconds <= min(cost.seconds for cost in costs.values()) * (1 + 1e-9)


def test_at_a_change_both_are_equally_fast() -> None:
    found = winners_by_size(ALLREDUCE, 64, 1.25e9, 20e-6)
    assert [name for _, name in found] == ["recursive-doubling", "halving-doubling"]
    doubling, halving = (ALLREDUCE[name](found[1][0], 64, 1.25e9, 20e-6).seconds for _, name in found)
    assert doubling == pytest.approx(halving, rel=1e-5)


def test_of_equally_fast_algorithms_the_one_with_fewer_steps_wins() -> None:
    """Without latency, ring and halving-doubling differ by rounding alone."""
    names: dict[str, Algorithm] = {"ring": allreduce.ring, "halving-doubling": allreduce.halving_doubling}
    assert fastest({name: cost(1e9, 64, 1e9, 0) for name, cost in names.items()}) == "halving-doubling"


def test_changes_are_found_where_they_are() -> None:
    found = changes(lambda x: int(x >= 10) + int(x >= 12345.6), 1, 1e9)
    assert [answer for _, answer in found] == [0, 1, 2]
    assert [edge for edge, _ in found] == pytest.approx([1, 10, 12345.6], rel=2e-6)

"""Shares for unequal devices, held against every way of cutting a small batch."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.core.errors import PlanError
from shoal.planner.search.shares import cut_batch, share_batch
from shoal.spec.parts import parts
from shoal.spec.plan import Batch, Mesh, Plan


def earliest_s(batch_size: int, rates: list[float], fixed_s: list[float]) -> float:
    """Return the end of the best of all ways to cut the batch."""
    cuts = itertools.combinations(range(1, batch_size), len(rates) - 1)
    ways = ([b - a for a, b in itertools.pairwise((0, *cut, batch_size))] for cut in cuts)
    return min(max(f + n / r for n, r, f in zip(way, rates, fixed_s, strict=True)) for way in ways)


@given(
    batch_size=st.integers(3, 12),
    rates=st.lists(st.floats(0.5, 8), min_size=3, max_size=3),
    fixed_s=st.lists(st.floats(0, 2), min_size=3, max_size=3),
)
def test_no_other_way_of_cutting_a_batch_ends_earlier(
    batch_size: int, rates: list[float], fixed_s: list[float]
) -> None:
    shared = share_batch(batch_size, rates=rates, fixed_s=fixed_s)
    assert sum(shared.parts) == batch_size
    assert shared.seconds == pytest.approx(earliest_s(batch_size, rates, fixed_s))


@given(batch_size=st.integers(8, 5000), rates=st.lists(st.floats(0.1, 10), min_size=1, max_size=8))
def test_the_shares_of_the_plan_give_the_loader_exactly_these_parts(batch_size: int, rates: list[float]) -> None:
    shared = share_batch(batch_size, rates=rates)
    assert tuple(parts(batch_size, shared.shares)) == shared.parts


@given(
    batch_size=st.integers(1, 5000),
    shares=st.lists(st.floats(0.01, 1), min_size=1, max_size=8),
    workers=st.integers(1, 600),
)
def test_the_planner_cuts_a_batch_where_the_loader_does(batch_size: int, shares: list[float], workers: int) -> None:
    unequal = tuple(share / math.fsum(shares) for share in shares)
    plan = Plan(mesh=Mesh(replicate=len(shares)), batch=Batch(shares=unequal))
    assert cut_batch(plan, batch_size) == parts(batch_size, unequal)
    equal = Plan(mesh=Mesh(replicate=workers))
    assert cut_batch(equal, batch_size) == parts(batch_size, equal.shares)


def test_a_device_of_twice_the_rate_takes_twice_the_samples() -> None:
    shared = share_batch(9, rates=[2, 1, 1])
    assert shared.parts in {(5, 2, 2), (4, 3, 2), (4, 2, 3)}
    assert (shared.seconds, shared.equal_seconds) == (2.5, 3.0)
    assert shared.gain == pytest.approx(1.2)


def test_equal_devices_get_equal_parts_and_gain_nothing() -> None:
    assert share_batch(12, rates=[3.0] * 4).parts == (3, 3, 3, 3)
    assert share_batch(12, rates=[3.0] * 4).gain == 1


def test_more_replicas_than_samples_are_refused() -> None:
    with pytest.raises(PlanError, match=r"^5 replicas for a global batch of 4 samples\. Use at most 4 replicas"):
        share_batch(4, rates=[1.0] * 5)

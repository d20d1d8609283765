import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.order import GROUP_BLOCKS, Order, Permutation, order


@given(num_samples=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_every_sample_has_exactly_one_position(num_samples: int, seed: int, epoch: int) -> None:
    samples = order(num_samples, np.arange(num_samples), seed=seed, epoch=epoch)
    assert sorted(samples.tolist()) == list(range(num_samples))


@given(num_samples=st.integers(1, 2**61), seed=st.integers(0, 100), data=st.data())
def test_a_sample_depends_on_nothing_but_its_position(num_samples: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), min_size=1, max_size=20)))
    together = order(num_samples, positions, seed=seed, epoch=3)
    one_by_one = [int(order(num_samples, positions[i : i + 1], seed=seed, epoch=3)[0]) for i in range(len(positions))]
    assert together.tolist() == one_by_one
    assert together.min() >= 0
    assert together.max() < num_samples


def test_seeds_and_epochs_give_different_orders() -> None:
    orders = {tuple(order(100, np.arange(100), seed=s, epoch=e).tolist()) for s in range(10) for e in range(10)}
    assert len(orders) == 100


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    # A run that is resumed elsewhere must go on with the same samples: these numbers never change.
    assert order(10, np.arange(10), seed=0, epoch=0).tolist() == [0, 5, 4, 2, 7, 3, 1, 6, 9, 8]
    assert order(10**12, np.arange(3), seed=1, epoch=2).tolist() == [256152706839, 406607969825, 666052492908]


@pytest.mark.parametrize("num_samples", [5, 7, 30, 100, 1000])
def test_pairs_of_positions_are_spread_evenly(num_samples: int) -> None:
    """Chi-square over the samples at two neighbouring positions, for many seeds, in 25 or fewer cells each."""
    seeds, cells = 4000, min(num_samples, 5)
    counts = np.zeros((cells, cells))
    for seed in range(seeds):
        first, second = order(num_samples, np.arange(2), seed=seed, epoch=0) * cells // num_samples
        counts[first, second] += 1
    edges = np.bincount(np.arange(num_samples) * cells // num_samples)
    pairs = np.outer(edges, edges) - np.diag(edges)  # the same sample cannot be at both
    expected = seeds * pairs / (num_samples * (num_samples - 1))
    possible = expected > 0
    chi_square = float(((counts - expected)[possible] ** 2 / expected[possible]).sum())
    freedom = int(possible.sum()) - 1
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5  # four standard deviations


def test_a_trillion_samples_take_no_memory_and_no_time() -> None:
    tracemalloc.start()
    started = time.perf_counter()
    samples = Permutation(10**12, seed=0, epoch=0)(np.arange(10**11, 10**11 + 512))
    elapsed_s, (_, peak_bytes) = time.perf_counter() - started, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(set(samples.tolist())) == 512
    assert peak_bytes < 1_000_000
    assert elapsed_s < 5  # a stored permutation of this length would take hours: no close call


@given(
    num_samples=st.integers(1, 600), block_rows=st.integers(1, 40), seed=st.integers(0, 2**63), epoch=st.integers(0, 9)
)
def test_a_block_shuffle_gives_every_sample_one_position(
    num_samples: int, block_rows: int, seed: int, epoch: int
) -> None:
    shuffle = Order(num_samples, seed=seed, block_rows=block_rows)
    samples = shuffle.samples(np.arange(num_samples), epoch=epoch)
    assert sorted(samples.tolist()) == list(range(num_samples))
    for position in range(0, num_samples, 1 + num_samples // 10):
        assert shuffle.samples(np.array([position]), epoch=epoch)[0] == samples[position]


@pytest.mark.parametrize("num_samples", [10_000, 10_007])
def test_a_group_of_a_block_shuffle_is_made_of_few_blocks(num_samples: int) -> None:
    block_rows = 20
    samples = Order(num_samples, seed=1, block_rows=block_rows).samples(np.arange(num_samples), epoch=0)
    # Behind the short block the groups are shifted: what is looked at here may then be parts of two.
    most = GROUP_BLOCKS if num_samples % block_rows == 0 else 2 * GROUP_BLOCKS + 1
    for first in range(0, num_samples, GROUP_BLOCKS * block_rows):
        blocks = np.unique(samples[first : first + GROUP_BLOCKS * block_rows] // block_rows)
        assert len(blocks) <= most
    places = np.argsort(samples)  # where in the epoch each sample stands
    assert abs(np.corrcoef(np.arange(num_samples), places)[0, 1]) < 0.1


def test_block_shuffles_differ_between_seeds_and_epochs_and_never_change() -> None:
    orders = {
        tuple(Order(50, seed=seed, block_rows=4).samples(np.arange(50), epoch=epoch).tolist())
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25
    # A run that is resumed elsewhere must go on with the same samples: these numbers never change.
    assert Order(10, seed=0, block_rows=3).samples(np.arange(10), epoch=0).tolist() == [2, 3, 1, 9, 5, 4, 8, 0, 6, 7]
    assert Order(10**12, seed=1, block_rows=4096).samples(np.arange(3), epoch=2).tolist() == [
        980087630562,
        301632621672,
        301632620732,
    ]

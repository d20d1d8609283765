"""The order of samples in C beside NumPy's, bit for bit."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.order import Permutation
from shoal.native import order


@given(num_samples=st.integers(1, 2**61), seed=st.integers(0, 2**63), data=st.data())
def test_the_permutation_in_c_is_that_of_numpy(num_samples: int, seed: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, num_samples - 1), min_size=0, max_size=90)), dtype=np.int64)
    permutation = Permutation(num_samples, seed=seed, epoch=1)
    assert permutation(positions).tolist() == permutation.plainly(positions).tolist()


def test_small_permutations_in_c_are_those_of_numpy() -> None:
    for num_samples in range(1, 200):
        permutation = Permutation(num_samples, seed=num_samples, epoch=0)
        positions = np.arange(num_samples)
        assert permutation(positions).tolist() == permutation.plainly(positions).tolist()


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=20), data=st.data())
def test_rows_are_found_in_the_part_that_holds_them(sizes: list[int], data: st.DataObject) -> None:
    starts = np.array([0, *np.cumsum(sizes)], dtype=np.int64)
    if starts[-1] == 0:
        return
    rows = np.array(data.draw(st.lists(st.integers(0, int(starts[-1]) - 1), max_size=30)), dtype=np.int64)
    part, inside = order.locate(rows, starts)
    for row, number, place in zip(rows.tolist(), part.tolist(), inside.tolist(), strict=True):
        assert starts[number] <= row < starts[number + 1]
        assert place == row - starts[number]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_row_that_lies_nowhere_is_named(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(order, "library", lambda: None)
    starts = np.array([0, 3, 7])
    assert [found.tolist() for found in order.locate(np.array([6, 0, 3]), starts)] == [[1, 0, 1], [3, 0, 0]]
    for row in (7, -1):
        with pytest.raises(IndexError, match=f"row {row} of 7"):
            order.locate(np.array([0, row]), starts)


def test_without_the_library_numpy_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_it = Permutation(1000, seed=3, epoch=4)(np.arange(1000))
    monkeypatch.setattr(order, "library", lambda: None)
    assert Permutation(1000, seed=3, epoch=4)(np.arange(1000)).tolist() == with_it.tolist()


@pytest.mark.parametrize("num_samples", [2**20 + 7, 2**32 - 1, 2**32 + 1, 10**12, 2**61 - 1, 2**62 - 1])
def test_long_stretches_of_large_permutations_are_those_of_numpy(num_samples: int) -> None:
    permutation = Permutation(num_samples, seed=5, epoch=3)
    random = np.random.default_rng(0)
    for count in (31, 32, 33, 1000, 4096):
        positions = random.integers(0, num_samples, count)
        assert np.array_equal(permutation(positions), permutation.plainly(positions))

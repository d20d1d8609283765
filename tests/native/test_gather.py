"""Gathers in C beside NumPy's indexing."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.native import gather
from shoal.native.gather import Parts, gather_bytes, gather_parts, gather_rows, gather_windows


@pytest.fixture(params=["c", "numpy"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(gather, "library", lambda: None)
    return str(request.param)


pytestmark = pytest.mark.usefixtures("engine")


@pytest.mark.parametrize("shape", [(), (1,), (3,), (128,), (5, 7)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.int64])
@pytest.mark.parametrize("threads", [1, 3])
def test_gathered_rows_are_those_that_were_asked_for(shape: tuple[int, ...], dtype: Any, threads: int) -> None:
    random = np.random.default_rng(0)
    source = random.integers(0, 200, (1000, *shape)).astype(dtype)
    rows = random.integers(0, 1000, 5001)
    out = np.empty((5001, *shape), dtype)
    gather_rows(source, rows, out, threads=threads)
    assert np.array_equal(out, source[rows])


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_come_from_the_parts_that_were_named(threads: int) -> None:
    random = np.random.default_rng(1)
    bases = [random.random((n, 300)) for n in (7, 1, 900)]
    part = random.integers(0, 3, 4000).astype(np.int32)
    row = random.integers(0, np.array([7, 1, 900])[part])
    out = np.empty((4000, 300))
    gather_parts(bases, part, row, out, threads=threads)
    assert np.array_equal(out, np.stack([bases[p][r] for p, r in zip(part, row, strict=True)]))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.int64])
@pytest.mark.parametrize("width", [1, 17, 1025])
def test_windows_are_the_tokens_of_the_stream_as_int64(dtype: Any, width: int) -> None:
    random, limits = np.random.default_rng(2), np.iinfo(dtype)
    streams = [random.integers(limits.min, limits.max, n, dtype=dtype, endpoint=True) for n in (1025, 5000)]
    part = random.integers(0, 2, 300).astype(np.int32)
    start = random.integers(0, np.array([1025, 5000])[part] - width + 1)
    out = np.empty((300, width), np.int64)
    gather_windows(streams, part, start, out, threads=2)
    wanted = np.stack([streams[p][s : s + width] for p, s in zip(part, start, strict=True)]).astype(np.int64)
    assert np.array_equal(out, wanted)


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_variable_rows_follow_one_another_and_may_be_empty(dtype: Any) -> None:
    random = np.random.default_rng(3)
    offsets = [np.concatenate([[0], np.cumsum(random.integers(0, 40, n))]) for n in (50, 3)]
    values = [random.integers(0, 200, o[-1]).astype(dtype) for o in offsets]
    part = random.integers(0, 2, 500).astype(np.int32)
    row = random.integers(0, np.array([50, 3])[part])
    flat, where = gather_bytes(values, offsets, part, row, threads=2)
    wanted = [values[p][offsets[p][r] : offsets[p][r + 1]] for p, r in zip(part, row, strict=True)]
    assert np.array_equal(flat, np.concatenate(wanted))
    assert np.array_equal(np.diff(where), [len(one) for one in wanted])


def test_nothing_asked_for_is_nothing_gathered() -> None:
    none = np.empty(0, np.int64)
    gather_rows(np.zeros((3, 4)), none, np.empty((0, 4)))
    gather_windows([np.zeros(9, np.uint16)], None, none, np.empty((0, 5), np.int64))
    flat, where = gather_bytes([np.zeros(9, np.uint8)], [np.array([0, 9])], None, none)
    assert (len(flat), where.tolist()) == (0, [0])


def test_a_part_that_is_not_here_yet_has_no_rows_until_it_comes() -> None:
    parts = Parts([np.ones((2, 2)), None])
    out, row, part = np.empty((1, 2)), np.array([1]), np.array([1], np.int32)
    with pytest.raises(DataError, match="Position 0 of the batch asks for row 1 of part 1, which has 0"):
        gather_parts(parts, part, row, out)
    parts[1] = np.full((2, 2), 5.0)
    gather_parts(parts, part, row, out)
    assert out.tolist() == [[5, 5]]


def _rows(part: list[int], row: list[int]) -> None:
    gather_parts([np.zeros((4, 2))] * 2, np.array(part, np.int32), np.array(row), np.empty((len(row), 2)), threads=2)


def _window(start: int) -> None:
    gather_windows([np.zeros(10, np.uint16)], None, np.array([start]), np.empty((1, 4), np.int64))


def _bytes(offsets: list[int], row: int) -> None:
    gather_bytes([np.zeros(10, np.uint8)], [np.array(offsets)], None, np.array([row]))


@pytest.mark.parametrize(
    ("ask", "said"),
    [
        (lambda: _rows([0, 1], [0, 4]), "Position 1 of the batch asks for row 4 of part 1, which has 4"),
        (lambda: _rows([0, 1], [-1, 4]), "Position 0 .* row -1"),
        (lambda: _rows([2], [0]), "part 2; there are 2 parts"),
        (lambda: _rows([-1], [0]), "part -1"),
        (lambda: _window(7), r"\[7, 11\) of part 0, which has 10"),
        (lambda: _window(-1), r"\[-1, 3\)"),
        (lambda: _window(2**63 - 1), "asks for"),
        (lambda: _bytes([0, 5], 1), "row 1 of part 0, which is not there"),
        (lambda: _bytes([0, 5], -1), "row -1"),
        (lambda: _bytes([0, 11], 0), "the part is damaged"),
        (lambda: _bytes([5, 4], 0), "the part is damaged"),
        (lambda: _bytes([-1, 4], 0), "the part is damaged"),
    ],
)
def test_what_lies_outside_is_named_and_not_read(ask: Callable[[], None], said: str) -> None:
    with pytest.raises(DataError, match=said):
        ask()


@pytest.mark.parametrize(
    ("source", "out", "said"),
    [
        (np.zeros((4, 2), np.float32), np.empty((1, 3), np.float32), "do not go into"),
        (np.zeros((4, 2), np.float32), np.empty((1, 2)), "do not go into"),
        (np.zeros((4, 2), np.float32).T, np.empty((1, 4), np.float32), "one contiguous buffer"),
    ],
)
def test_a_buffer_of_another_kind_is_refused(source: NDArray[Any], out: NDArray[Any], said: str) -> None:
    with pytest.raises(DataError, match=said):
        gather_rows(source, np.array([0]), out)


def test_gaps_and_unlike_parts_are_refused() -> None:
    with pytest.raises(DataError, match="contiguous, writable"):
        gather_rows(np.zeros((4, 2)), np.array([0, 1]), np.empty((2, 4))[:, ::2])
    with pytest.raises(DataError, match="the parts of a column are alike"):
        Parts([np.zeros((4, 2)), np.zeros((4, 3))])
    with pytest.raises(DataError, match="integer tokens"):
        gather_windows([np.zeros(9)], None, np.array([0]), np.empty((1, 5), np.int64))

"""Documents in rows of tokens, in C beside NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.native import tokens
from shoal.native.gather import Parts

lengths = st.lists(st.integers(0, 30), min_size=1, max_size=40)


def filled(offsets: NDArray[np.int64], width: int) -> list[int]:
    """Return where each row begins, and where the last ends, by asking for every row."""
    count, marks = tokens.mark_rows(offsets, width)
    part = np.ones(count, dtype=np.int32)
    begin, end = tokens.rows_at(Parts([None, offsets]), Parts([None, marks]), part, np.arange(count), width)
    assert count == tokens.count_rows(offsets, width)
    assert begin[1:].tolist() == end[:-1].tolist()
    return [*begin.tolist(), int(offsets[-1])]


@given(lengths=lengths, width=st.integers(1, 40))
def test_rows_are_filled_alike_in_c_and_in_python(lengths: list[int], width: int) -> None:
    offsets = np.array([0, *np.cumsum(lengths)], dtype=np.int64)
    rows = np.array(filled(offsets, width))
    assert rows.tolist() == [*tokens._fill_plainly(offsets.tolist(), width), offsets[-1]]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokens, "library", lambda: None)
        assert filled(offsets, width) == rows.tolist()
    assert (np.diff(rows) <= width).all()
    assert (np.diff(rows) > 0).all()
    assert sum(np.diff(rows)) == offsets[-1]
    for first, last in zip(rows[:-1].tolist(), rows[1:].tolist(), strict=True):
        inside = [n for n in range(len(lengths)) if lengths[n] and first <= offsets[n] < last]
        whole = [n for n in inside if offsets[n + 1] <= last]
        assert whole == inside or lengths[inside[-1]] > width, "only a document longer than a row is cut"


def test_the_worked_example() -> None:
    assert filled(np.array([0, 3, 7, 9, 18]), 6) == [0, 3, 9, 15, 18]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_row_that_is_not_there_is_refused(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(tokens, "library", lambda: None)
    offsets = np.arange(0, 1000, 7)
    count, marks = tokens.mark_rows(offsets, 10)
    assert count > tokens.EVERY
    for part, row in [(0, count), (0, -1), (0, 10**6), (1, 0), (-1, 0)]:
        with pytest.raises(DataError, match=rf"row {row} of 10 tokens is not in part {part}"):
            tokens.rows_at(Parts([offsets]), Parts([marks]), np.array([part], np.int32), np.array([row]), 10)


@given(lengths=lengths, width=st.integers(1, 20), data=st.data())
def test_the_places_of_tokens_are_those_of_numpy(lengths: list[int], width: int, data: st.DataObject) -> None:
    offsets = np.array([0, *np.cumsum(lengths)], dtype=np.int64)
    total = int(offsets[-1])
    length = np.array(data.draw(st.lists(st.integers(0, min(width, total)), max_size=8)), dtype=np.int64)
    start = np.array([data.draw(st.integers(0, total - n)) for n in length.tolist()], dtype=np.int64)
    parts, part = Parts([offsets, offsets]), np.ones(len(start), dtype=np.int32)
    shape = (len(start), width)
    found = [np.full(shape, 99, dtype=np.int32) for _ in range(4)]
    tokens.document_places(parts, part, start, length, document=found[0], position=found[1])
    assert tokens._places_plainly(parts, part, start, length, document=found[2], position=found[3]) == -1
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[3])


@pytest.mark.parametrize("is_compiled", [True, False])
def test_what_leaves_its_part_is_refused(is_compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_compiled:
        monkeypatch.setattr(tokens, "library", lambda: None)
    parts = Parts([np.array([0, 4, 9])])
    out = np.zeros((1, 4), dtype=np.int32)
    for part, start, length in [(0, 6, 4), (0, -1, 2), (1, 0, 1), (0, 0, 5), (-1, 0, 1)]:
        with pytest.raises(DataError, match=rf"the tokens from {start} on leave part {part}"):
            tokens.document_places(
                *(parts, np.array([part], dtype=np.int32), np.array([start]), np.array([length])),
                document=out,
                position=out.copy(),
            )
    with pytest.raises(DataError, match="decrease"):
        tokens.mark_rows(np.array([0, 5, 3]), 4)

"""A run of a flattened tensor, as boxes of the tensor."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.parallel.deepspeed.slices import boxes

SHAPES = st.lists(st.integers(1, 4), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_boxes_are_the_run_in_its_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    numel = math.prod(shape)
    first = data.draw(st.integers(0, numel))
    count = data.draw(st.integers(0, numel - first))
    whole = torch.arange(numel).view(shape)
    found: list[int] = []
    for box in boxes(shape, first, count):
        piece = whole
        for dim, (offset, size) in enumerate(zip(box.offset, box.sizes, strict=True)):
            piece = piece.narrow(dim, offset, size)
        assert box.start == len(found)
        found += piece.flatten().tolist()
    assert found == list(range(first, first + count))


def test_a_matrix_is_cut_into_three_boxes_at_most() -> None:
    assert [(box.sizes, box.offset) for box in boxes((4, 3), 2, 7)] == [((1, 1), (0, 2)), ((2, 3), (1, 0))]
    assert len(list(boxes((100, 30), 31, 2900))) == 3

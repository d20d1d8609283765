"""The order in which parts are staged is that in which the first epoch reads them."""

import numpy as np
import pytest

from shoal.data.order import Order
from shoal.data.partition import Schedule
from shoal.data.stage.first_reads import first_reads
from shoal.spec.parts import cut

STARTS = np.array([0, 30, 70, 70, 100, 180, 203], dtype=np.int64)
NUM_SAMPLES, BATCH = 203, 10
SHARES = (0.5, 0.2, 0.3)


def plainly(order: Order, index: int, num_reads: int) -> list[int]:
    """Return the same, step by step."""
    schedule = Schedule(NUM_SAMPLES, BATCH, shares=SHARES, index=index)
    found: dict[int, None] = {}
    for step in range(min(num_reads, NUM_SAMPLES) // BATCH):  # without the last, partial batch
        samples = order.samples(np.arange(*schedule.part(step)), epoch=0)
        found.update(dict.fromkeys((np.searchsorted(STARTS, samples, side="right") - 1).tolist()))
    return list(found)


@pytest.mark.parametrize("num_reads", [10, 50, 200])
@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("order", [Order(NUM_SAMPLES, 4), Order(NUM_SAMPLES, 4, True, 5), Order(NUM_SAMPLES, 0, False)])
def test_parts_are_those_that_the_batches_of_the_node_read(order: Order, index: int, num_reads: int) -> None:
    bounds = cut(BATCH, SHARES)
    mine = bounds[index], bounds[index + 1]
    assert first_reads(STARTS, order, batch_size=BATCH, mine=mine, num_reads=num_reads) == plainly(
        order, index, num_reads
    )


def test_later_epochs_may_read_what_the_first_does_not() -> None:
    order = Order(NUM_SAMPLES, 4, block_rows=40)
    few = first_reads(STARTS, order, batch_size=BATCH, mine=(0, 1), num_reads=30)
    assert len(few) < len(STARTS) - 1
    every = first_reads(STARTS, order, batch_size=BATCH, mine=(0, 1), num_reads=3 * NUM_SAMPLES)
    assert sorted(every) == [0, 1, 2, 3, 4, 5]  # also the empty one: nobody looks so closely
    assert every[: len(few)] == few
    unshuffled = Order(NUM_SAMPLES, is_shuffled=False)
    again = first_reads(STARTS, unshuffled, batch_size=BATCH, mine=(0, 1), num_reads=3 * NUM_SAMPLES)
    assert again == [0, 1, 3, 4, 5]


def test_nothing_is_wanted_by_a_node_that_has_no_sample() -> None:
    assert first_reads(STARTS, Order(NUM_SAMPLES), batch_size=BATCH, mine=(0, 0), num_reads=10) == []

"""Batches of a ring beside NumPy's indexing."""

import numpy as np
import pytest

from shoal.data.order import order
from shoal.native.gather import Parts
from shoal.native.gather_ring import FAILED, NOT_YET, Ring, RingColumn, RingSchedule, is_available

pytestmark = pytest.mark.skipif(not is_available(), reason="shoal is installed without its C part")

SOURCE = np.arange(100, dtype=np.int32).reshape(50, 2)
PARTS = [SOURCE[:20], SOURCE[20:21], SOURCE[21:]]
STARTS = np.array([0, 20, 21, 50])


def ring_of(parts: list[np.ndarray], starts: np.ndarray, *, steps: int, slots: int) -> tuple[Ring, list[np.ndarray]]:
    """Return a ring over rows as they lie, in batches of 8, and its slots."""
    schedule = RingSchedule(
        num_samples=50,
        batch_size=8,
        steps_per_epoch=7,
        part=(0, 8),
        last_part=(0, 2),
        steps=range(steps),
        grid=None,
        num_keys=0,
        starts=starts,
    )
    ring = Ring([RingColumn(Parts(parts))], schedule)
    memory = [np.zeros((8, 2), np.int32) for _ in range(slots)]
    for slot in memory:
        ring.add_slot([slot])
    return ring, memory


def asked(ring: Ring) -> int:
    for _ in range(600):
        if (slot := ring.next()) != NOT_YET:
            return slot
    raise TimeoutError


@pytest.mark.parametrize("threads", [0, 1, 5])
@pytest.mark.parametrize("ahead", [0, 1, 6])
@pytest.mark.parametrize("does_help", [True, False])
def test_batches_come_in_order_whoever_gathers_them(threads: int, ahead: int, does_help: bool) -> None:
    ring, slots = ring_of(PARTS, STARTS, steps=700, slots=ahead + 1)
    ring.set_pace(ahead=ahead, threads=threads, does_help=does_help or not threads)
    for step in range(700):
        first = step % 7 * 8
        wanted = SOURCE[first : first + 8]
        assert np.array_equal(slots[asked(ring)][: len(wanted)], wanted), step
    waited_s, load_s = ring.times_s()
    assert waited_s > 0
    assert load_s > 0
    ring.close()


def test_a_batch_with_a_row_outside_its_part_is_refused_and_the_next_one_comes() -> None:
    ring, slots = ring_of([PARTS[0], PARTS[1], SOURCE[21:24]], STARTS, steps=7, slots=3)
    ring.set_pace(ahead=2, threads=1, does_help=True)
    assert [asked(ring) == FAILED for _ in range(7)] == [False, False, False, True, True, True, True]
    again, slots = ring_of(PARTS, STARTS[:-1], steps=7, slots=1)  # no part has the last rows
    again.set_pace(ahead=0, threads=0, does_help=True)
    found = [asked(again) for _ in range(7)]
    assert [slot == FAILED for slot in found] == [False, False, True, True, True, True, True]
    assert len(slots) == 1


def test_an_epoch_is_not_begun_before_its_keys_are_there() -> None:
    keys = np.random.SeedSequence((3, 0)).generate_state(12, np.uint64).astype(np.uint64)
    schedule = RingSchedule(
        num_samples=50,
        batch_size=50,
        steps_per_epoch=1,
        part=(0, 50),
        last_part=(0, 50),
        steps=range(9),
        grid=(8, 7),
        num_keys=len(keys),
        starts=STARTS,
    )
    ring, memory = Ring([RingColumn(Parts(PARTS))], schedule), np.zeros((50, 2), np.int32)
    ring.add_slot([memory])
    ring.set_pace(ahead=0, threads=0, does_help=True)
    assert ring.next() == NOT_YET
    ring.set_keys(0, keys)
    assert ring.next() == 0
    assert np.array_equal(memory, SOURCE[order(50, np.arange(50), seed=3, epoch=0)])
    assert ring.next() == NOT_YET


def test_a_ring_can_be_closed_at_any_time_and_has_no_more_slots_than_c_can_hold() -> None:
    ring, _ = ring_of(PARTS, STARTS, steps=7, slots=2)
    ring.set_pace(ahead=1, threads=3, does_help=False)
    ring.close()
    ring.close()
    assert ring.next() in (NOT_YET, 0, 1), "what was gathered before is still there"
    with pytest.raises(AssertionError):
        ring_of(PARTS, STARTS, steps=7, slots=65)

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal.data.partition import Schedule, global_batch
from shoal.spec.parts import cut, parts


def test_the_worked_examples() -> None:
    assert cut(8, (0.25, 0.25, 0.10, 0.4)) == [0, 2, 4, 5, 8]
    assert parts(10, (1 / 3, 1 / 3, 1 / 3)) == [3, 4, 3]
    assert parts(64, (0.25,) * 4) == [16] * 4
    assert parts(10, (0.1, 0.2, 0.7)) == [1, 2, 7]


weights = st.lists(st.integers(1, 100), min_size=1, max_size=16)


@given(num_samples=st.integers(0, 5000), weights=weights)
def test_parts_cover_the_batch_and_are_within_one_sample_of_their_share(num_samples: int, weights: list[int]) -> None:
    shares = [weight / sum(weights) for weight in weights]
    bounds = cut(num_samples, shares)
    assert bounds[0] == 0
    assert bounds[-1] == num_samples
    for share, part in zip(shares, parts(num_samples, shares), strict=True):
        assert part >= 0
        assert abs(part - share * num_samples) <= 1 + 1e-6


@given(num_samples=st.integers(1, 500), batch_size=st.integers(1, 64), epochs=st.integers(1, 3))
def test_batches_use_every_position_of_every_epoch_once(num_samples: int, batch_size: int, epochs: int) -> None:
    per_epoch = -(-num_samples // batch_size)
    seen: dict[int, list[int]] = {}
    for step in range(epochs * per_epoch):
        where = global_batch(step, num_samples=num_samples, batch_size=batch_size)
        assert 1 <= where.num_samples <= batch_size
        seen.setdefault(where.epoch, []).extend(range(where.first, where.last))
    assert seen == {epoch: list(range(num_samples)) for epoch in range(epochs)}


@given(
    num_samples=st.integers(1, 300),
    batch_size=st.integers(1, 40),
    weights=weights,
    at_once=st.integers(1, 20),
    drop_last=st.booleans(),
    data=st.data(),
)
def test_chunks_of_steps_give_each_worker_its_part_of_every_batch(
    num_samples: int, batch_size: int, weights: list[int], at_once: int, drop_last: bool, data: st.DataObject
) -> None:
    shares = tuple(weight / sum(weights) for weight in weights)
    schedules = [
        Schedule(num_samples, batch_size, shares=shares, index=index, drop_last=drop_last)
        for index in range(len(shares))
    ]
    per_epoch = schedules[0].steps_per_epoch
    if per_epoch == 0:
        return
    first = data.draw(st.integers(0, 2 * per_epoch))
    chunks = list(schedules[0].chunks(first, 2 * per_epoch, at_once=at_once))
    assert [step for chunk in chunks for step in chunk] == list(range(first, 2 * per_epoch))
    for chunk in chunks:
        assert len({step // per_epoch for step in chunk}) == 1
        assert len(chunk) <= at_once
        parts = []
        for schedule in schedules:
            positions, sizes = schedule.positions(chunk)
            bounds = [0, *itertools.accumulate(sizes)]
            parts.append([positions[a:b].tolist() for a, b in itertools.pairwise(bounds)])
        for number, step in enumerate(chunk):
            where = schedules[0].where(step)
            together = [position for part in parts for position in part[number]]
            assert together == list(range(where.first, where.last))


def test_a_part_without_samples_has_a_stand_in_where_that_is_asked_for() -> None:
    shares = (0.9, 0.1)
    last = range(1, 2)
    plain = Schedule(9, 8, shares=shares, index=1)
    assert [part.tolist() if isinstance(part, np.ndarray) else part for part in plain.positions(last)] == [[], (0,)]
    stand_in = Schedule(9, 8, shares=shares, index=1, has_stand_ins=True)
    assert [part.tolist() if isinstance(part, np.ndarray) else part for part in stand_in.positions(last)] == [[8], (1,)]

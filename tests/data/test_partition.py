from hypothesis import given
from hypothesis import strategies as st

from shoal.data.partition import global_batch
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

"""Live shares, decided: slow workers take less, all are done together, and noise changes nothing."""

import itertools
import random
from collections.abc import Sequence

import pytest

from shoal.spec.parts import cut, hand_out, parts
from shoal.sync.shares import Balance, Change, Window

BATCH = 32


def window(samples: Sequence[int], each_s: Sequence[float], *, fixed_s: float = 0.001, own_s: float = 0.0) -> Window:
    """Return what workers measure that take `each_s` a sample."""
    seconds = tuple(own_s + n * each for n, each in zip(samples, each_s, strict=True))
    return Window(tuple(samples), seconds, (fixed_s,) * len(samples), step_s=max(seconds) + fixed_s + 0.002)


def settled(each_s: Sequence[float], windows: int = 12, *, own_s: float = 0.0) -> tuple[tuple[int, ...], list[Change]]:
    """Return the parts after some windows, and all changes on the way."""
    balance, samples, changes = Balance(BATCH), tuple(parts(BATCH, [1 / len(each_s)] * len(each_s))), []
    for _ in range(windows):
        change = balance.decide(window(samples, each_s, own_s=own_s))
        if change is not None:
            changes.append(change)
            samples = change.samples
    return samples, changes


def test_a_worker_four_times_slower_takes_what_it_can_do_meanwhile() -> None:
    samples, changes = settled([0.01, 0.01, 0.01, 0.04])
    assert samples == (10, 10, 10, 2)
    assert len(changes) == 1
    assert changes[0].gain == pytest.approx(1 - 0.103 / 0.323, rel=1e-6)
    assert changes[0].sample_s == pytest.approx((0.01, 0.01, 0.01, 0.04))


def test_the_loader_cuts_a_batch_into_just_these_parts() -> None:
    for samples in ([10, 10, 10, 2], [1, 30, 1], [7, 11, 13, 1]):
        change = Change(tuple(samples), (1.0,) * len(samples), 0.5)
        assert parts(sum(samples), change.shares) == samples
        assert cut(sum(samples), change.shares)[-1] == sum(samples)


def test_one_window_alone_changes_nothing() -> None:
    balance = Balance(BATCH)
    equal, slow = [0.01] * 4, [0.01, 0.01, 0.01, 0.04]
    for each_s in (slow, equal, slow, equal, equal, slow):
        assert balance.decide(window([8] * 4, each_s)) is None
    assert balance.decide(window([8] * 4, slow)) is not None


def test_nothing_changes_before_it_may() -> None:
    balance, slow = Balance(BATCH), window([8] * 4, [0.01, 0.01, 0.01, 0.04])
    assert [balance.decide(slow, may_change=False) for _ in range(5)] == [None] * 5
    assert balance.decide(slow) is not None


def test_noise_among_equal_workers_changes_nothing() -> None:
    for seed in range(200):
        noisy, balance = random.Random(seed), Balance(BATCH)
        for _ in range(30):
            each_s = [0.01 * noisy.uniform(0.96, 1.04) for _ in range(4)]
            assert balance.decide(window([8] * 4, each_s)) is None


def test_medians_that_may_be_far_off_must_promise_more() -> None:
    slower = window([8] * 4, [0.01, 0.01, 0.01, 0.0125])
    sure, unsure = Balance(BATCH), Balance(BATCH)
    doubtful = Window(slower.samples, slower.seconds, slower.fixed_s, slower.step_s, noise=0.1)
    assert [sure.decide(slower), sure.decide(slower)][1] is not None
    assert [unsure.decide(doubtful) for _ in range(5)] == [None] * 5


def test_what_a_worker_takes_for_itself_is_told_from_what_a_sample_takes() -> None:
    samples, changes = settled([0.01, 0.01, 0.01, 0.04], own_s=0.05)
    ends = [0.05 + n * each for n, each in zip(samples, [0.01, 0.01, 0.01, 0.04], strict=True)]
    best = hand_out(BATCH, sample_s=[0.01, 0.01, 0.01, 0.04], fixed_s=[0.05] * 4)
    assert max(ends) <= 1.05 * max(0.05 + n * each for n, each in zip(best, [0.01, 0.01, 0.01, 0.04], strict=True))
    assert len(changes) <= 2


def test_a_worker_that_recovers_gets_its_part_back() -> None:
    balance, seen = Balance(BATCH), []
    samples: tuple[int, ...] = (8, 8, 8, 8)
    for number in range(24):
        each_s = [0.01, 0.01, 0.01, 0.04 if number < 8 else 0.01]
        change = balance.decide(window(samples, each_s))
        if change is not None:
            samples = change.samples
            seen.append(samples)
    assert seen[0] == (10, 10, 10, 2)
    assert samples == (8, 8, 8, 8)


def test_a_change_that_brought_nothing_is_taken_back_and_asked_for_less_often() -> None:
    """Workers on the same cores: whoever has more samples takes all the more for each."""
    balance, changes = Balance(BATCH), []
    samples: tuple[int, ...] = (16, 16)
    for number in range(40):
        seconds = (0.16, 0.32) if samples == (16, 16) else (0.34, 0.30)
        change = balance.decide(Window(samples, seconds, (0.0, 0.0), step_s=max(seconds)))
        if change is not None:
            samples = change.samples
            changes.append((number, change.is_back))
    assert changes[:2] == [(1, False), (2, True)]
    waits = [late[0] - early[0] for early, late in itertools.pairwise(changes)]
    assert waits[1::2] == sorted(waits[1::2])
    assert waits[1] == 4
    assert samples == (16, 16)


def test_no_worker_gets_more_than_fits() -> None:
    change = None
    balance = Balance(BATCH)
    for _ in range(2):
        slow = window([8] * 4, [0.01, 0.01, 0.01, 0.04])
        change = balance.decide(Window(slow.samples, slow.seconds, slow.fixed_s, slow.step_s, most=(9, 32, 32, 32)))
    assert change is not None
    assert change.samples[0] <= 9
    assert sum(change.samples) == BATCH


def test_samples_are_handed_out_as_well_as_any_other_way() -> None:
    chance = random.Random(5)
    for _ in range(60):
        each = [chance.choice([0.5, 1.0, 1.5, 4.0]) for _ in range(3)]
        fixed = [chance.choice([0.0, 0.0, 2.0, 7.0]) for _ in range(3)]
        samples = chance.randint(3, 12)
        ways = (way for way in itertools.product(range(1, samples + 1), repeat=3) if sum(way) == samples)
        best = min(max(f + n * e for f, n, e in zip(fixed, way, each, strict=True)) for way in ways)
        taken = hand_out(samples, sample_s=each, fixed_s=fixed)
        assert sum(taken) == samples
        assert min(taken) >= 1
        assert max(f + n * e for f, n, e in zip(fixed, taken, each, strict=True)) == pytest.approx(best)


def test_a_batch_of_a_million_is_handed_out_at_once() -> None:
    taken = hand_out(1 << 20, sample_s=[1e-6 * (1 + i % 7) for i in range(64)])
    ends = [n * (1 + i % 7) for i, n in enumerate(taken)]
    assert sum(taken) == 1 << 20
    assert max(ends) - min(ends) <= 7

"""What noisy measurements say, held against figures that are known."""

import random

import pytest

from shoal.core.fit import fit_half_rate, typical


def test_the_typical_time_is_the_mean_of_the_faster_half() -> None:
    assert typical([5.0]) == 5.0
    assert typical([100.0, 1.0, 2.0, 3.0]) == 1.5
    assert typical([1000.0, 4.0, 2.0, 1.0, 2000.0]) == pytest.approx(7 / 3)
    assert typical([9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0]) == 3.5


def test_the_worked_example_holds_in_the_limit() -> None:
    full, half = fit_half_rate([(1, 2), (9, 10), (999_999, 1_000_000)])
    assert full == pytest.approx(1, rel=1e-5)
    assert half == pytest.approx(1, rel=1e-4)


def test_a_rate_that_grows_with_the_amount_is_found_again_from_noisy_times() -> None:
    chance = random.Random(1)
    points = [(x, (x + 2e6) / 280e9 * chance.uniform(0.97, 1.03)) for x in (5e5, 4e6, 3e7, 3e8, 2e9)]
    full, half = fit_half_rate(points)
    assert full == pytest.approx(280e9, rel=0.05)
    assert half == pytest.approx(2e6, rel=0.1)


def test_a_constant_rate_has_its_half_at_nothing() -> None:
    assert fit_half_rate([(10, 1), (100, 10)]) == pytest.approx((10, 0))

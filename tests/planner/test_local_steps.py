"""How many local steps a link asks for."""

import pytest

from shoal.planner.sync.local import MOST_STEPS, SHARE, choose_local_steps
from shoal.spec.device import Link

SLOW = Link(source="100 Mb/s", bytes_per_s=12.5e6, latency_s=1e-4)


def test_the_worked_example() -> None:
    chosen = choose_local_steps(num_bytes=45e6, workers=4, link=SLOW, compute_s=0.5)
    assert chosen.meeting_s == pytest.approx(1.5 * 45 / 12.5 + 6e-4)
    assert chosen.steps == 206
    assert chosen.share <= SHARE
    assert "206 local steps" in chosen.reason()


@pytest.mark.parametrize("compute_s", [0.003, 0.02, 0.1, 0.7, 3.0])
@pytest.mark.parametrize("num_bytes", [1e5, 3e6, 2e7])
def test_it_is_the_least_number_that_does_it(compute_s: float, num_bytes: float) -> None:
    chosen = choose_local_steps(num_bytes=num_bytes, workers=3, link=SLOW, compute_s=compute_s)
    if chosen.steps < MOST_STEPS:
        assert chosen.share <= SHARE * (1 + 1e-6)
    if chosen.steps > 1:
        one_less = chosen.meeting_s / ((chosen.steps - 1) * compute_s + chosen.meeting_s)
        assert one_less > SHARE


def test_a_fast_link_asks_for_one_and_a_hopeless_one_for_the_most() -> None:
    fast = Link(source="fast", bytes_per_s=1e11, latency_s=1e-6)
    assert choose_local_steps(num_bytes=1e6, workers=8, link=fast, compute_s=0.1).steps == 1
    assert choose_local_steps(num_bytes=1e12, workers=1, link=SLOW, compute_s=0.1).steps == 1
    hopeless = choose_local_steps(num_bytes=1e10, workers=8, link=SLOW, compute_s=0.1)
    assert hopeless.steps == MOST_STEPS
    assert f"at most {MOST_STEPS}" in hopeless.reason()

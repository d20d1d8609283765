"""Checkpoint intervals, held against the best of all intervals and against simulated failures."""

import random

import pytest

from shoal.planner.search.reliability import NODE_MTBF_S, daly_s, lost_fraction, plan_checkpoints, young_s


def simulated_lost_fraction(
    interval_s: float, *, stall_s: float, mtbf_s: float, restart_s: float, failures: int, seed: int
) -> float:
    """Work, stall, fail and restart at random, and return the part of the time that was not lasting work."""
    chance = random.Random(seed)
    elapsed_s = saved_s = 0.0
    for _ in range(failures):
        until_failure_s = chance.expovariate(1 / mtbf_s)
        elapsed_s += until_failure_s
        saved_s += until_failure_s // (interval_s + stall_s) * interval_s
        while (next_failure_s := chance.expovariate(1 / mtbf_s)) < restart_s:
            elapsed_s += next_failure_s  # failed while it restarted: again
        elapsed_s += restart_s
    return 1 - saved_s / elapsed_s


@pytest.mark.parametrize(
    ("stall_s", "mtbf_s", "restart_s"), [(60, 40_000, 0), (60, 40_000, 300), (600, 4_000, 120), (5, 300, 30)]
)
def test_the_lost_part_is_that_of_simulated_failures(stall_s: float, mtbf_s: float, restart_s: float) -> None:
    interval_s = daly_s(stall_s, mtbf_s)
    expected = lost_fraction(interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s)
    simulated = simulated_lost_fraction(
        interval_s, stall_s=stall_s, mtbf_s=mtbf_s, restart_s=restart_s, failures=40_000, seed=1
    )
    assert simulated == pytest.approx(expected, rel=0.03)  # 40,000 random failures: three times the spread of the mean


@pytest.mark.parametrize(("stall_s", "mtbf_s"), [(1, 86_400), (60, 40_000), (600, 20_000), (300, 3_000)])
def test_no_other_interval_loses_noticeably_less_than_dalys(stall_s: float, mtbf_s: float) -> None:
    chosen = lost_fraction(daly_s(stall_s, mtbf_s), stall_s=stall_s, mtbf_s=mtbf_s)
    tried_s = [young_s(stall_s, mtbf_s) * 1.02**power for power in range(-100, 101)]
    best = min(lost_fraction(interval_s, stall_s=stall_s, mtbf_s=mtbf_s) for interval_s in tried_s)
    assert chosen <= best * 1.001


def test_youngs_and_dalys_intervals_agree_where_a_stall_is_short() -> None:
    assert young_s(1, 1_000_000) == pytest.approx(1414.2, rel=1e-4)
    assert daly_s(1, 1_000_000) == pytest.approx(young_s(1, 1_000_000), rel=0.001)
    assert daly_s(300, 100) == 100, "a stall longer than two failures apart: once between failures"


def test_more_nodes_fail_more_often_and_save_more_often() -> None:
    one, many = plan_checkpoints(nodes=1, stall_s=60), plan_checkpoints(nodes=128, stall_s=60)
    assert many.mtbf_s == NODE_MTBF_S / 128
    assert many.interval_s < one.interval_s
    assert many.interval_s / 60 == pytest.approx(76, abs=1)
    assert one.lost_fraction < many.lost_fraction == pytest.approx(0.027, abs=0.001)


def test_a_run_that_never_reaches_its_next_checkpoint_loses_everything() -> None:
    assert lost_fraction(1e6, stall_s=1, mtbf_s=1) == 1.0

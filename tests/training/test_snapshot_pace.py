"""Snapshots are taken as often as they cost next to nothing."""

from shoal.fault.snapshot import Spent
from shoal.training.snapshot_pace import Pace


def test_the_pace_is_such_that_snapshots_cost_a_hundredth() -> None:
    pace = Pace(0, is_busy=True)
    assert [pace.is_due(step) for step in (1, 2)] == [True, True]
    for step in range(1, 9):
        pace.note(step, Spent(stall_s=0.001, copy_s=0.005))
    assert pace.is_to_decide
    pace._steps.extend([0.206] * 8)
    assert pace.asked() == 3  # 6 ms of 200 ms
    assert pace.decide(3)
    assert [step for step in range(9, 18) if pace.is_due(step)] == [9, 12, 15]
    assert "every 3 steps: it costs 6.0 ms, and a step takes 206.0 ms" in pace.sentence()
    assert Pace(5, is_busy=True).asked() == 5


def test_between_hosts_there_are_two_steps_from_one_snapshot_to_the_next() -> None:
    pace = Pace(1, is_busy=False)
    pace.keep_apart(2)
    due = []
    for step in range(1, 10):
        if pace.is_due(step):
            due.append(step)
            pace.note(step, Spent())
        if step == 6:
            pace.decide(3)
    assert due == [2, 4, 6, 9]

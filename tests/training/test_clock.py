"""The clock of a step, with moments given by hand."""

from collections.abc import Callable

import pytest
import torch

from shoal.training.clock import StepClock


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what sets the time."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    return lambda seconds: now.__setitem__(0, seconds)


def test_marks_spans_and_waits_share_the_time_of_a_step(at: Callable[[float], None]) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    at(2.0)
    with clock.waiting():
        at(2.5)
    clock.span("forward_s", 1.0, 3.0)
    clock.span("backward_s", 6.0, 9.0)
    at(10.0)
    clock.mark("bubble_s")
    with clock.waiting(), clock.waiting():  # one inside another counts once
        at(10.25)
    at(11.0)
    clock.mark("optimizer_s")
    parts = {"forward_s": 1.5, "backward_s": 3.0, "comm_s": 0.75, "bubble_s": 5.0, "optimizer_s": 0.75}
    assert clock.take()() == pytest.approx(parts)


def test_a_noted_moment_ends_one_part_and_begins_another(at: Callable[[float], None]) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    at(1.0)
    clock.note()
    at(2.0)
    clock.note()
    at(5.0)
    clock.mark_noted("backward_s", "comm_s")
    assert clock.take()() == pytest.approx({"backward_s": 2.0, "comm_s": 3.0})


def test_the_next_step_begins_where_the_last_was_taken(at: Callable[[float], None]) -> None:
    clock = StepClock(torch.device("cpu"))
    clock.restart()
    at(1.0)
    clock.mark("forward_s")
    first = clock.take()
    at(4.0)
    clock.mark("forward_s")
    assert (first(), clock.take()()) == ({"forward_s": 1.0}, {"forward_s": 3.0})

from collections.abc import Callable

import pytest

from shoal.core.looks import Looks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that goes on when it is told."""
    now_s = 100.0

    def go_on(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr("shoal.core.looks.time.monotonic", lambda: now_s)
    return go_on


def test_looks_get_rarer_up_to_a_limit_and_begin_anew_when_something_was_found(clock: Callable[[float], None]) -> None:
    look = Looks(1.0, 6.0)
    waits = []
    for _ in range(5):
        assert look.is_due()
        assert not look.is_due()
        waits.append(look.left_s())
        clock(look.left_s())
    assert waits == [1.0, 2.0, 4.0, 6.0, 6.0]
    look.begin_anew()
    assert look.left_s() == 0.0
    assert look.is_due()
    assert look.left_s() == 1.0


def test_a_look_that_comes_late_is_one_look(clock: Callable[[float], None]) -> None:
    look = Looks(1.0, 6.0)
    assert look.is_due()
    clock(100.0)
    assert look.is_due()
    assert not look.is_due()

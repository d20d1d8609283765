"""Futures of the engine: as they are, unless they had to be ended."""

import threading

import pytest
import torch

from shoal.comm import endable as endable_module
from shoal.comm.endable import end_futures_soon, endable, may_leave_threads
from shoal.comm.failure import is_peer_failure

TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def _nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endable_module, "_UNDER_WAY", set())
    monkeypatch.setattr(endable_module, "_has_ended", False)
    monkeypatch.setattr(endable_module, "_ENDS_AFTER_S", 0.05)


def future_of_tensors() -> "torch.futures.Future[list[torch.Tensor]]":
    return torch.futures.Future()


def timers() -> list[threading.Timer]:
    """Return those that will end futures, and none of other tests."""
    found = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    return [timer for timer in found if timer.function is endable_module._end]


def wait_for_timers() -> None:
    for timer in timers():
        timer.join(TIMEOUT_S)


@pytest.mark.parametrize("is_done_before", [True, False])
def test_it_has_the_value_of_the_future(is_done_before: bool) -> None:
    engine = future_of_tensors()
    if is_done_before:
        engine.set_result([torch.ones(2)])
        found = endable(engine)
    else:
        found = endable(engine)
        assert may_leave_threads()
        engine.set_result([torch.ones(2)])
    assert found.wait()[0].tolist() == [1.0, 1.0]
    end_futures_soon()
    wait_for_timers()
    assert not may_leave_threads()


def test_it_has_the_error_of_the_future() -> None:
    def fail(_: object) -> None:
        raise ValueError("of its own")

    engine = future_of_tensors()
    found = endable(engine.then(fail))
    engine.set_result([])
    with pytest.raises(RuntimeError, match="of its own") as caught:
        found.wait()
    assert not is_peer_failure(caught.value)
    assert not may_leave_threads()


def test_what_is_under_way_when_somebody_is_lost_fails_soon_as_if_the_engine_had_failed_it() -> None:
    engine = future_of_tensors()
    found = endable(engine).then(lambda future: future.value()[0])
    end_futures_soon()
    with pytest.raises(RuntimeError, match="ended here, since the engine did not notice") as caught:
        found.wait()
    assert is_peer_failure(caught.value)
    assert may_leave_threads()
    engine.set_result([torch.zeros(1)])  # at last, when nobody waits for it any more


def test_what_begins_afterwards_goes_on() -> None:
    lost, later = endable(future_of_tensors()), future_of_tensors()
    end_futures_soon()
    found = endable(later)
    with pytest.raises(RuntimeError, match="ended here"):
        lost.wait()
    wait_for_timers()
    later.set_result([torch.ones(1)])
    assert found.wait()[0].item() == 1.0


def test_what_the_engine_says_within_the_half_second_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endable_module, "_ENDS_AFTER_S", TIMEOUT_S)
    engine = future_of_tensors()
    found = endable(engine)
    end_futures_soon()
    (timer,) = timers()
    engine.set_result([torch.ones(1)])
    assert found.wait()[0].item() == 1.0
    timer.cancel()
    assert not may_leave_threads()

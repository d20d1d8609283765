"""Futures of the engine that can be ended from here, where the engine does not end them.

Gloo does not fail an operation of which a part of a message has arrived or left when its connections are shut down (see
waiter.py), so that C++ that waits for its future, as DDP does at the end of backward, waits until the group's timeout.

1. `endable(future)` ends as `future` does.
2. When somebody is lost, connections are shut down (`end_operations`), upon which the engine fails what it can.
3. What was under way then, and still is half a second later, is ended: it fails as if the engine had failed it. Its
   group has a thread that goes on waiting, so whoever leaves must not wait for that (`may_leave_threads`).
"""

import threading
from typing import Any, TypeAlias

import torch

_Future: TypeAlias = "torch.futures.Future[Any]"

_ENDS_AFTER_S = 0.5
_LOCK = threading.Lock()
_UNDER_WAY: set[_Future] = set()
_has_ended = False


def endable(future: _Future) -> _Future:
    """Return a future that has the value or the error of `future`, or fails when it is ended."""
    gate: _Future = torch.futures.Future()
    with _LOCK:
        _UNDER_WAY.add(gate)

    def is_done(done: _Future) -> None:
        with _LOCK:
            is_first = gate in _UNDER_WAY
            _UNDER_WAY.discard(gate)
        if is_first:
            gate.set_result(done)

    outcome = gate.then(_value)
    future.add_done_callback(is_done)
    return outcome


def end_futures_soon() -> None:
    """Let all futures that are under way now fail, in half a second: until then the engine may say more."""
    with _LOCK:
        gates = list(_UNDER_WAY)
    if gates:
        timer = threading.Timer(_ENDS_AFTER_S, _end, [gates])
        timer.daemon = True
        timer.start()


def may_leave_threads() -> bool:
    """Return whether groups of this process may have threads that still wait: a future is under way, or was ended."""
    return _has_ended or bool(_UNDER_WAY)


def _end(gates: list[_Future]) -> None:
    global _has_ended  # noqa: PLW0603
    with _LOCK:
        left = [gate for gate in gates if gate in _UNDER_WAY]
        _UNDER_WAY.difference_update(left)
        _has_ended = _has_ended or bool(left)
    for gate in left:
        gate.set_result(None)


def _value(gate: _Future) -> Any:
    done = gate.value()
    if done is None:
        raise RuntimeError("Connection closed by peer: ended here, since the engine did not notice.")
    return done.value()

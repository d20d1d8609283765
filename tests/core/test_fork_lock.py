"""Locks that are held while a process is forked."""

import os
import threading

from shoal.core.fork_lock import ForkLock


def test_a_lock_that_a_thread_holds_is_free_in_a_child_and_held_in_its_parent() -> None:
    lock, is_held, let_go = ForkLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert is_held.wait(60)
    child = os.fork()
    if child == 0:
        with lock:
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not lock._lock.acquire(blocking=False)
    let_go.set()
    thread.join(60)
    with lock:
        assert not lock._lock.acquire(blocking=False)

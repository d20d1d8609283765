"""A worker killed, stopped or failing in the middle of a collective: every survivor raises PeerLost that names it.

Real processes, since they end: tests/comm/alive_worker.py forks one for each worker.
"""

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from shoal.comm.alive import watching
from shoal.comm.calls import CALLS
from shoal.comm.rank import Rank
from shoal.comm.store import connect, host_store
from shoal.comm.waiter import Waiter
from shoal.core.errors import PeerLost
from tests.comm.alive_worker import TIMEOUT_S
from tests.support.ranks import RankPool

SILENT_S = 1.5
"""Less than the default, so that tests are short; more than a busy machine keeps a thread waiting."""


@contextmanager
def workers(count: int, **options: Any) -> Iterator[tuple[dist.Store, "subprocess.Popen[str]"]]:
    """Have `count` workers that run a collective over and over."""
    store, port = host_store(host="127.0.0.1", timeout_s=60)
    command = [sys.executable, "-m", "tests.comm.alive_worker", "127.0.0.1", str(port), str(count), "all"]
    options = {"silent_s": SILENT_S, **options}
    with subprocess.Popen(
        [*command, json.dumps(options)], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield store, process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def lines(process: "subprocess.Popen[str]", count: int, *, timeout_s: float = TIMEOUT_S + 60) -> list[dict[str, Any]]:
    """Return the next `count` lines that the workers print."""
    assert process.stdout is not None
    end_s, text = time.monotonic() + timeout_s, ""
    descriptor = process.stdout.fileno()
    while text.count("\n") < count:
        ready, _, _ = select.select([descriptor], [], [], max(0.0, end_s - time.monotonic()))
        assert ready, f"only these lines came in {timeout_s:g} s: {text}"
        chunk = os.read(descriptor, 65536).decode()
        assert chunk, f"the workers have ended after {text}"
        text += chunk
    return [json.loads(line) for line in text.splitlines()]


def ends(process: "subprocess.Popen[str]", survivors: int, *, ready: int) -> dict[int, dict[str, Any]]:
    """Return how each of the survivors ended."""
    found = [line for line in lines(process, survivors + ready) if "type" in line]
    return {line["worker"]: line for line in found}


@pytest.mark.parametrize(
    ("collective", "signal_name"),
    [
        ("gloo", "SIGKILL"),
        ("gloo", "SIGSTOP"),
        ("ddp", "SIGKILL"),
        ("ddp", "SIGSTOP"),
        ("ring", "SIGSTOP"),
        ("pairs", "SIGKILL"),
        ("two-level", "SIGKILL"),
    ],
)
def test_every_survivor_names_the_worker_that_was_killed_or_stopped(collective: str, signal_name: str) -> None:
    with workers(4, collective=collective, victim=2, signal=signal_name) as (_, process):
        found = ends(process, 3, ready=4)
    assert sorted(found) == [0, 1, 3]
    for end in found.values():
        assert end["type"] == "PeerLost", end
        assert end["text"].startswith("worker 2 ("), end
        assert ("has been silent for" if signal_name == "SIGSTOP" else "has ended without a word") in end["text"]
        # Gloo may wait for its timeout when a message was cut in two; nothing else does, which is no question of speed.
        assert end["seconds"] < (TIMEOUT_S + 10 if collective == "gloo" else TIMEOUT_S - 10)


def test_survivors_do_not_wait_for_a_sum_of_gradients_that_the_engine_goes_on_waiting_for() -> None:
    with workers(3, collective="ddp", victim=1, signal="SIGSTOP", deaf=True) as (_, process):
        found = ends(process, 2, ready=3)
    for survivor in (0, 2):
        assert found[survivor]["type"] == "PeerLost"
        assert found[survivor]["text"].startswith("worker 1 (")
        assert found[survivor]["seconds"] < TIMEOUT_S - 10


def test_a_worker_that_fails_by_itself_is_named_with_its_error() -> None:
    with workers(3, collective="halving-doubling", victim=1, error="no such word") as (_, process):
        found = ends(process, 3, ready=3)
    assert found[1]["type"] == "ValueError"
    for survivor in (0, 2):
        assert found[survivor]["type"] == "PeerLost"
        assert found[survivor]["text"].endswith("failed: ValueError: no such word")
        assert found[survivor]["text"].startswith("worker 1 (")


def in_order(rank: Rank) -> list[Any]:
    """Return what is lost after some workers have left before others. Runs in the pool."""
    store = connect(rank, timeout_s=60)
    with watching(store, rank, timeout_s=60, silent_s=1.0) as watch:
        store.set(f"in {rank.index}", "")
        store.wait([f"in {other}" for other in range(rank.workers)])
        if rank.index < 2:
            return [watch.lost]
        end_s = time.monotonic() + 2.5
        while time.monotonic() < end_s and watch.lost is None:
            store.wait(["in 0"])
        watch.check()
        return [watch.lost]


def test_those_who_leave_in_order_are_not_missed(ranks: RankPool) -> None:
    assert ranks.run(in_order, workers=4) == [[None]] * 4


def own_error(rank: Rank) -> list[str | None]:
    """Return what comes out of a block with an error that is nobody else's, and the verdict left. Runs in the pool."""
    try:
        with watching(connect(rank, timeout_s=60), rank, timeout_s=60):
            raise RuntimeError("mine")
    except RuntimeError as error:
        return [str(error), CALLS.lost]


def test_an_error_of_ones_own_stays_what_it_is_and_ends_with_its_group(ranks: RankPool) -> None:
    assert ranks.run(own_error, workers=1) == [["mine", None]]


def test_a_wait_in_vain_is_given_up_and_the_next_one_works() -> None:
    never, waiter, asked = threading.Event(), Waiter(), []

    def in_vain() -> PeerLost | None:
        asked.append(True)
        return PeerLost("worker 1 is gone") if len(asked) > 1 else None

    with pytest.raises(PeerLost, match="worker 1 is gone"):
        waiter.wait(never.wait, in_vain=in_vain, every_s=0.01)
    waiter.wait(lambda: None, in_vain=in_vain, every_s=60)
    with pytest.raises(ZeroDivisionError):
        waiter.wait(lambda: 1 / 0, in_vain=in_vain, every_s=60)
    never.set()
    waiter.close()

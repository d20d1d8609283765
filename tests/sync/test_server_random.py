"""Hosts of servers that go at random moments, and gradients that leave while backward still runs."""

import random
import threading
import time
from typing import Any

import pytest
import torch

from shoal.core.errors import JobError
from shoal.spec.sync import Sync
from shoal.sync.server import link
from tests.sync.server_cluster import Bench, Worker, adamw, batch_of, part_of, sgd, together

CUTS = (6, 4, 2)
STEPS = 30


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_a_host_that_goes_at_any_moment_loses_nothing(seed: int, is_asynchronous: bool) -> None:
    chance = random.Random(seed)
    victim, after_s = chance.randrange(3), chance.uniform(0.0, 0.15)
    begun = threading.Barrier(3, timeout=20)

    def do(worker: Worker) -> Any:
        begun.wait()
        timer = threading.Timer(after_s, worker.servers.opened.hosts[0].close, kwargs={"linger_s": 0.0})
        if worker.rank.index == victim:
            timer.start()
        try:
            tickets, parts = worker.servers.tickets, 0
            if tickets is None:
                for step in range(1, STEPS + 1):
                    worker.step(step, part_of(step, worker.rank.index, CUTS))
                return worker.bench.row(), STEPS
            while (taken := tickets.next_part()) is not None:
                worker.step(taken[0], part_of(*taken, (4, 4, 4)), part=taken[1])
                parts += 1
            tickets.settle(STEPS)
            return worker.bench.row(), parts
        finally:
            if worker.rank.index == victim:
                timer.join()

    sync = Sync(mode="server", servers=3, asynchronous=is_asynchronous)
    found = together(3, do, sync, boundaries={STEPS}, last_step=STEPS)
    assert all(torch.equal(row, found[0][0]) for row, _ in found)
    if is_asynchronous:
        assert sum(parts for _, parts in found) == 3 * STEPS
        return
    bench = Bench(sgd)
    for step in range(1, STEPS + 1):
        bench.step(batch_of(step))
    assert torch.allclose(found[0][0], bench.row(), atol=1e-5)  # 30 steps with momentum


def test_gradients_that_leave_during_backward_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "CHUNK_NUMEL", 7)
    monkeypatch.setattr("shoal.sync.server.overlap.CHUNK_NUMEL", 7)

    def do(worker: Worker) -> Any:
        for step in range(1, 7):
            with worker.servers.sending():
                loss = worker.bench.backward(part_of(step, worker.rank.index, CUTS))
            worker.meet(step, loss, CUTS[worker.rank.index])
        return worker.bench.row(), worker.servers.overlap.sent_early

    found = together(3, do, Sync(mode="server", servers=2), build=adamw, clip_norm=0.1)
    bench = Bench(adamw, clip_norm=0.1)
    for step in range(1, 7):
        bench.step(batch_of(step))
    for row, sent_early in found:
        assert torch.allclose(row, bench.row(), atol=1e-6)
        assert sent_early == 6 * 9  # all of them: 57 numbers in 2 slices, 28 = 4 x 7 and 29 = 4 x 7 + 1


def test_a_second_backward_under_sending_is_refused() -> None:
    def do(worker: Worker) -> None:
        with worker.servers.sending():
            worker.bench.backward(batch_of(1))
            worker.bench.backward(batch_of(2))

    with pytest.raises(JobError, match="all but the last micro-batch"):
        together(1, do, Sync(mode="server"))


def test_a_stranger_is_not_served() -> None:
    def do(worker: Worker) -> bool:
        places = worker.servers.opened.places
        token, places.token = places.token, "guessed"
        connection = places.dial(0)
        places.token = token
        try:
            connection.receive()
        except ConnectionError:
            return True
        finally:
            connection.close()
        return False

    assert together(1, do, Sync(mode="server")) == [True]


def test_closing_takes_no_longer_than_the_goodbyes() -> None:
    def do(worker: Worker) -> None:
        worker.step(1, batch_of(1))

    before = threading.active_count()
    begin_s = time.monotonic()
    together(3, do, Sync(mode="server", servers=3))
    assert time.monotonic() - begin_s < 10.0  # the goodbyes would be waited for so long if they did not come
    assert threading.active_count() <= before

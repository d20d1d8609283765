"""Servers and workers that die: nothing that was acknowledged is lost, nothing counts twice, nobody hangs."""

import contextlib
import os
import signal
import threading
from typing import Any

import pytest
import torch

from shoal.core.errors import PeerLost
from shoal.spec.sync import Sync
from shoal.sync.server.process import HostProcess
from tests.sync.server_cluster import Bench, Worker, batch_of, part_of, sgd, together

CUTS = (6, 4, 2)
STEPS = 8
TOLERANCE = 1e-6


def reference() -> Bench:
    bench = Bench(sgd)
    for step in range(1, STEPS + 1):
        bench.step(batch_of(step))
    return bench


@pytest.mark.parametrize("servers", [1, 2])
def test_killed_server_processes_are_replaced_by_their_replicas(servers: int) -> None:
    turn = threading.Barrier(3, timeout=20)

    def do(worker: Worker) -> Any:
        for step in range(1, STEPS + 1):
            turn.wait()
            if step == 4 and worker.rank.index == 0:  # while the others are in the step already
                host = worker.servers.opened.hosts[0]
                assert isinstance(host, HostProcess)
                os.kill(host.process.pid, signal.SIGKILL)
            worker.step(step, part_of(step, worker.rank.index, CUTS))
        return worker.bench.row(), worker.bench.kept(), [link._epoch for link in worker.servers.opened.links]

    found = together(3, do, Sync(mode="server", servers=servers, place="processes"), boundaries={STEPS})
    expected = reference()
    for row, kept, epochs in found:
        assert torch.allclose(row, expected.row(), atol=TOLERANCE)
        assert all(torch.allclose(a, b, atol=TOLERANCE) for a, b in zip(kept, expected.kept(), strict=True))
        assert epochs[0] == 1


def test_hosts_that_die_one_after_the_other_leave_every_slice_served() -> None:
    turn = threading.Barrier(3, timeout=20)

    def do(worker: Worker) -> Any:
        for step in range(1, STEPS + 1):
            turn.wait()
            if step in {3, 6} and worker.rank.index == step // 3 - 1:
                worker.servers.opened.hosts[0].close(linger_s=0.0)
            worker.step(step, part_of(step, worker.rank.index, CUTS))
        return worker.bench.row()

    found = together(3, do, Sync(mode="server", servers=3), boundaries={STEPS})
    for row in found:
        assert torch.allclose(row, reference().row(), atol=TOLERANCE)


@pytest.mark.parametrize("is_asynchronous", [False, True])
def test_a_primary_that_lives_after_its_replica_has_taken_over_sends_its_workers_there(is_asynchronous: bool) -> None:
    turn = threading.Barrier(3, timeout=20)

    def do(worker: Worker) -> Any:
        places, steps = worker.servers.opened.places, range(1, STEPS + 1)
        tickets = worker.servers.tickets
        for step in steps:
            if tickets is not None:
                assert tickets.next_part() is not None
            turn.wait()
            if step in {3, 6} and worker.rank.index == 1:
                before = places.serving(0)
                assert before.replica is not None
                with contextlib.closing(places.dial(before.replica)) as connection:
                    message = {"op": "take over", "slice": 0, "epoch": before.epoch}
                    assert connection.request(message)["ok"]
            turn.wait()
            part = tickets._queue.held[0].part if tickets is not None else worker.rank.index
            worker.step(step, part_of(step, part, (4, 4, 4)), part=part)
        if tickets is not None:
            tickets.settle(STEPS)
        return worker.bench.row(), places.serving(0), places.dead(3)

    sync = Sync(mode="server", servers=3, asynchronous=is_asynchronous)
    found = together(3, do, sync, boundaries={STEPS}, last_step=STEPS)
    assert len({serving for _, serving, _ in found}) == 1
    assert found[0][1].primary == 2  # 0, then its replica 1, then that one's, for host 0 is where nobody looks again
    assert all(not dead for _, _, dead in found)
    assert all(torch.equal(row, found[0][0]) for row, _, _ in found)
    if not is_asynchronous:
        assert torch.allclose(found[0][0], reference().row(), atol=TOLERANCE)


def test_a_worker_that_dies_is_left_out_from_its_next_step_on() -> None:
    turn = threading.Barrier(3, timeout=20)

    def do(worker: Worker) -> Any:
        took_part = []
        for step in range(1, STEPS + 1):
            if step == 5 and worker.rank.index == 2:
                turn.wait()
                worker.die()
                return None
            if step == 5:
                turn.wait()
            took_part.append(worker.step(step, part_of(step, worker.rank.index, CUTS)).took_part)
        return worker.bench.row(), took_part

    found = together(3, do, Sync(mode="server", servers=2), boundaries=())
    bench = Bench(sgd)
    for step in range(1, STEPS + 1):
        bench.step(batch_of(step) if step < 5 else batch_of(step)[: sum(CUTS[:2])])
    for row, took_part in found[:2]:
        assert took_part == [(0, 1, 2)] * 4 + [(0, 1)] * 4
        assert torch.allclose(row, bench.row(), atol=TOLERANCE)


def test_a_server_without_a_replica_that_dies_is_named() -> None:
    def do(worker: Worker) -> None:
        worker.step(1, batch_of(1))
        worker.servers.opened.hosts[0].close(linger_s=0.0)
        worker.step(2, batch_of(2))

    with pytest.raises(PeerLost, match="the server of slice 0 is gone, and it had no replica"):
        together(1, do, Sync(mode="server"))

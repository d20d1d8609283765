"""Asynchronous servers: every part once, whoever does it; p parts are a step; nobody is too far ahead."""

import threading
import time
from typing import Any

import pytest
import torch

from shoal.spec.sync import Sync
from shoal.sync.server.tickets import Done
from tests.sync.server_cluster import BATCH, Bench, Worker, adamw, batch_of, part_of, plain_sgd, together

STEPS = 12
EQUAL = (3, 3, 3, 3)


def parts_of(worker: Worker, cuts: tuple[int, ...], *, seconds: float = 0.0) -> list[tuple[int, int]]:
    """Do all parts that come to a worker, settling at the last step; return which."""
    tickets, done = worker.servers.tickets, []
    assert tickets is not None
    while (taken := tickets.next_part()) is not None:
        time.sleep(seconds)
        worker.step(taken[0], part_of(*taken, cuts), part=taken[1])
        done.append(taken)
    tickets.settle(STEPS)
    return done


def test_each_part_is_done_once_and_a_fast_worker_does_more() -> None:
    sync = Sync(mode="server", servers=2, asynchronous=True, max_staleness=4)

    def do(worker: Worker) -> Any:
        seconds = 0.04 if worker.rank.index == 3 else 0.01
        return parts_of(worker, EQUAL, seconds=seconds), worker.bench.row(), worker.bench.backward(range(48))

    found = together(4, do, sync, build=plain_sgd, boundaries={STEPS}, last_step=STEPS)
    done = sorted(part for parts, _, _ in found for part in parts)
    assert done == [(step, part) for step in range(1, STEPS + 1) for part in range(4)]
    assert len(found[3][0]) < min(len(parts) for parts, _, _ in found[:3])
    assert all(torch.equal(row, found[0][1]) for _, row, _ in found)
    bench = Bench(plain_sgd)
    for step in range(1, STEPS + 1):
        bench.step(batch_of(step))
    first_loss, last_loss = Bench(plain_sgd).backward(range(48)), bench.backward(range(48))
    # On this problem gradients that are a step or two old do about what those of steps in turn do.
    assert abs(found[0][2] - last_loss) < 0.2 * abs(first_loss - last_loss)


def test_one_worker_alone_does_what_one_process_does() -> None:
    sync = Sync(mode="server", asynchronous=True)
    found = together(1, lambda w: (parts_of(w, (BATCH,)), w.bench.row()), sync, boundaries={STEPS}, last_step=STEPS)
    bench = Bench()
    for step in range(1, STEPS + 1):
        bench.step(batch_of(step))
    assert torch.allclose(found[0][1], bench.row(), atol=1e-6)


def test_gradients_that_are_late_cost_little_where_steps_are_small() -> None:
    def momentum(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)

    def do(worker: Worker) -> float:
        parts_of(worker, EQUAL, seconds=0.012 if worker.rank.index == 3 else 0.003)
        return worker.bench.backward(range(48))

    sync = Sync(mode="server", servers=2, asynchronous=True)
    found = together(4, do, sync, build=momentum, boundaries={STEPS}, last_step=STEPS)
    bench = Bench(momentum)
    for step in range(1, STEPS + 1):
        bench.step(batch_of(step))
    assert found[0] == pytest.approx(bench.backward(range(48)), rel=0.1)  # of 12 steps, one or two are late


def test_the_parts_of_a_step_move_as_far_as_the_step() -> None:
    """All four parts are computed with the same parameters: then it is the step, of any optimizer."""
    turn = threading.Barrier(4, timeout=20)
    cuts = (6, 3, 2, 1)

    def do(worker: Worker) -> Any:
        tickets = worker.servers.tickets
        assert tickets is not None
        taken = tickets.next_part()
        assert taken is not None
        turn.wait()
        met = worker.step(taken[0], part_of(*taken, cuts), part=taken[1])
        settled = tickets.settle(1)
        return worker.bench.row(), met, settled

    sync = Sync(mode="server", servers=3, asynchronous=True)
    found = together(4, do, sync, build=adamw, boundaries={1}, last_step=1)
    bench = Bench(adamw)
    loss = bench.step(batch_of(1))
    for row, met, settled in found:
        assert torch.allclose(row, bench.row(), atol=1e-6)
        assert met.staleness == 0
        assert (settled.weight, settled.took_part) == (BATCH, (0, 1, 2, 3))
        assert settled.loss == pytest.approx(loss, abs=1e-6)


def test_nobody_goes_further_ahead_than_the_staleness_allows() -> None:
    ahead_by: list[int] = []
    slow_at = [0]
    """The step of the oldest part that the slow worker holds: moved on before that part is pushed, so never too low."""
    turn = threading.Barrier(2, timeout=20)

    def do(worker: Worker) -> None:
        tickets, is_slow = worker.servers.tickets, worker.rank.index == 0
        assert tickets is not None
        ahead = tickets.next_part()
        if is_slow and ahead is not None:
            slow_at[0] = ahead[0]
        turn.wait()
        while (taken := ahead) is not None:
            if is_slow:
                time.sleep(0.05)
            else:
                ahead_by.append(taken[0] - slow_at[0])
            ahead = tickets.next_part()
            if is_slow:
                slow_at[0] = ahead[0] if ahead is not None else STEPS
            worker.step(taken[0], part_of(*taken, (6, 6)), part=taken[1])
        tickets.settle(STEPS)

    together(2, do, Sync(mode="server", asynchronous=True, max_staleness=1), boundaries={STEPS}, last_step=STEPS)
    assert max(ahead_by) == 1


def test_the_tickets_of_a_worker_that_dies_are_given_to_others() -> None:
    turn = threading.Barrier(3, timeout=20)

    def do(worker: Worker) -> Any:
        tickets = worker.servers.tickets
        assert tickets is not None
        if worker.rank.index == 2:
            first, _ = tickets.next_part(), tickets.next_part()
            assert first is not None
            worker.step(first[0], part_of(*first, (4, 4, 4)), part=first[1])
            turn.wait()
            worker.die()
            return []
        turn.wait()
        return parts_of(worker, (4, 4, 4), seconds=0.01)

    sync = Sync(mode="server", servers=2, asynchronous=True)
    found = together(3, do, sync, boundaries={STEPS}, last_step=STEPS)
    done = sorted(part for parts in found for part in parts)
    assert len(done) == len(set(done)) == 3 * STEPS - 1


def test_done_keeps_what_lies_beyond_the_oldest() -> None:
    done = Done(4)
    for ticket in (6, 5, 8):
        done.add(ticket)
    assert (done.oldest, sorted(done.beyond), done.count) == (4, [5, 6, 8], 7)
    done.add(4)
    assert (done.oldest, sorted(done.beyond), done.count) == (7, [8], 8)
    assert done.has(6)
    assert done.has(8)
    assert not done.has(7)

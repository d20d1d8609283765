"""Workers that die, stop or leave inside a collective: the others say who, and nothing stays behind.

These workers are killed, so they do not come from the pool: a server that has torch loaded forks them.
"""

import json
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.shm.bells import Bells
from shoal.comm.shm.group import SharedGroup, join
from shoal.comm.shm.meeting import gather
from shoal.comm.shm.watch import LINE_BYTES, Watch
from shoal.comm.store import host_store
from shoal.core.errors import PeerLost
from shoal.sync.shared import SharedGradients

Collective: TypeAlias = Callable[[SharedGroup], None]
WORKERS, VICTIM = 3, 1
PATIENCE_S = 60.0  # for a slow machine; what is tested comes within a second or two
LARGE = 6_000_000


def reduces(group: SharedGroup) -> None:
    group.all_reduce(torch.ones(LARGE))


def scatters(group: SharedGroup) -> None:
    group.reduce_scatter(torch.ones(LARGE // WORKERS), torch.ones(LARGE // WORKERS * WORKERS))


def gathers(group: SharedGroup) -> None:
    group.all_gather(torch.ones(LARGE * WORKERS), torch.ones(LARGE))


def broadcasts(group: SharedGroup) -> None:
    group.broadcast(torch.ones(LARGE), 0)


def reduces_in_place(group: SharedGroup) -> None:
    buffer = group.buffer(LARGE, torch.float32)
    for _ in range(4):
        buffer.all_reduce()


def waits(group: SharedGroup) -> None:
    for _ in range(6):
        group.barrier()


def makes_buffers(group: SharedGroup) -> None:
    for _ in range(6):
        group.buffer(1000, torch.float32)


def sums_gradients(group: SharedGroup) -> None:
    model = nn.Sequential(*[nn.Linear(50, 50) for _ in range(4)])
    gradients = SharedGradients(model.parameters(), group, bucket_bytes=8000)
    for _ in range(4):
        model.zero_grad()
        torch.autograd.backward(model(torch.ones(2, 50)).sum())
        gradients.finish()


COLLECTIVES = [reduces, scatters, gathers, broadcasts, reduces_in_place, waits, makes_buffers, sums_gradients]


def fall(how: int, *, at_ring: int) -> None:
    """Send this process the signal `how` in the middle of its `at_ring`-th ring: some hear it, others do not."""
    rings = 0
    real = Bells.ring

    def ring(bells: Bells) -> None:
        nonlocal rings
        rings += 1
        if rings == at_ring:
            bells._post(bells._out[-1])
            os.kill(os.getpid(), how)
        real(bells)

    patch.object(Bells, "ring", ring).start()


def worker(index: int, port: int, pipe: Connection, collective: Collective, how: int, timeout_s: float) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    with join(store, index=index, count=WORKERS, timeout_s=timeout_s) as group:
        pipe.send("joined")
        if index == VICTIM:
            fall(how, at_ring=5)
        begin_s = time.monotonic()
        try:
            collective(group)
            pipe.send("done")
        except PeerLost as error:
            pipe.send((str(error), time.monotonic() - begin_s))
        pipe.poll(PATIENCE_S)  # until the test ends: this worker's end is no sign to the others


class Trio:
    """Three workers that meet in shared memory, one of which will fall."""

    def __init__(self, context: Any, collective: Collective, *, how: int, timeout_s: float) -> None:
        self._store, port = host_store(host="127.0.0.1", timeout_s=PATIENCE_S)
        self.pipes, self.processes = [], []
        for index in range(WORKERS):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=worker, args=(index, port, theirs, collective, how, timeout_s), daemon=True
            )
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        assert [self.hear(index) for index in range(WORKERS)] == ["joined"] * WORKERS

    def hear(self, index: int) -> Any:
        assert self.pipes[index].poll(PATIENCE_S), f"worker {index} says nothing"
        return self.pipes[index].recv()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.join(PATIENCE_S)
            process.close()
            pipe.close()


@pytest.fixture(scope="module")
def context() -> Any:
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["tests.comm.test_shm_faults"])
    return made


@pytest.fixture
def fall_in(context: Any) -> Iterator[Callable[..., Trio]]:
    made: list[Trio] = []

    def start(collective: Collective, *, how: int, timeout_s: float) -> Trio:
        made.append(Trio(context, collective, how=how, timeout_s=timeout_s))
        return made[-1]

    yield start
    for trio in made:
        trio.close()


@pytest.mark.parametrize("collective", COLLECTIVES, ids=lambda c: c.__name__)
def test_a_worker_killed_inside_is_named_by_all_others(fall_in: Callable[..., Trio], collective: Any) -> None:
    trio = fall_in(collective, how=signal.SIGKILL, timeout_s=PATIENCE_S)
    for survivor in (0, 2):
        message, seconds = trio.hear(survivor)
        assert message.startswith(f"worker {VICTIM} ")
        assert "silent" not in message
        assert seconds < PATIENCE_S / 2  # by its death, not by the timeout


@pytest.mark.parametrize(
    "collective", [reduces, reduces_in_place, makes_buffers, sums_gradients], ids=lambda c: c.__name__
)
def test_a_worker_stopped_inside_is_named_by_all_others_after_the_timeout(
    fall_in: Callable[..., Trio], collective: Any
) -> None:
    trio = fall_in(collective, how=signal.SIGSTOP, timeout_s=1.5)
    for survivor in (0, 2):
        message, _ = trio.hear(survivor)
        assert message.startswith(f"worker {VICTIM} ")
    assert trio.processes[VICTIM].is_alive()


def leaves_early(group: SharedGroup) -> None:
    group.barrier()
    if group.index == VICTIM:
        group.close()
    else:
        group.barrier()


def test_a_worker_that_leaves_while_others_wait_for_it_is_named(fall_in: Callable[..., Trio]) -> None:
    trio = fall_in(leaves_early, how=signal.SIGKILL, timeout_s=PATIENCE_S)
    for survivor in (0, 2):
        message, _ = trio.hear(survivor)
        assert message.startswith(f"worker {VICTIM} ")
        assert "left the group" in message or f"lost to worker {2 - survivor}" in message


def watch_of(lines: memoryview, index: int) -> Watch:
    return Watch(
        lines, [os.pidfd_open(os.getpid()) for _ in range(4)], index=index, numbers=[10, 11, 12, 13], timeout_s=5
    )


def test_silence_is_blamed_on_who_is_waited_for_in_the_end() -> None:
    lines = memoryview(bytearray(4 * LINE_BYTES))
    first, second, third, _ = watches = [watch_of(lines, index) for index in range(4)]
    first.note_waiting(1)
    second.note_waiting(2)
    assert first.silence_of(1).lost == 2  # 0 waits for 1, which waits for 2, which is not waiting
    third.note_waiting(0)
    assert first.silence_of(1).lost == 1  # a circle: nobody further along is to blame
    second.note_going_on()
    assert first.silence_of(1).lost == 1
    assert "worker 13 was lost to worker 11" in _verdict_after_loss(watches)
    for watch in watches:
        watch.leave()


def _verdict_after_loss(watches: list[Watch]) -> str:
    watches[1].lose(watches[1].silence_of(3), "a test")
    verdict = watches[0].verdict_on(1)
    assert verdict is not None
    assert verdict.lost == 3
    with pytest.raises(PeerLost, match="worker 13 has been silent for 5 s; worker 11 waited in a test"):
        watches[1].check()
    return verdict.why


def test_strangers_are_turned_away_from_the_meeting() -> None:
    store = _StoreWithStranger()
    with pytest.raises(PeerLost, match="worker 1 has not joined"):
        gather(store, count=2, numbers=[0, 1], timeout_s=0.5, join_number=1)
    assert store.stranger.recv(1000) in (b"", b"{}")
    store.stranger.close()


class _StoreWithStranger(dist.HashStore):
    """As soon as the meeting's name is known, somebody without the secret connects."""

    def set(self, key: str, value: str) -> None:
        self.stranger = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.stranger.settimeout(PATIENCE_S)
        self.stranger.connect("\0" + json.loads(value)[0])
        self.stranger.send(json.dumps({"secret": "guessed", "index": 1}).encode())

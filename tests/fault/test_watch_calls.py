"""What a worker tells of the collectives that it is in: torch's recorder, and bells in shared memory."""

from typing import Any

import torch

from shoal.comm.calls import CALLS
from shoal.comm.group import all_reduce_sum, joined
from shoal.comm.rank import Rank
from shoal.comm.shm.group import join
from shoal.comm.store import connect
from tests.support.ranks import RankPool
from tests.support.waiting import wait_until


def in_a_group(rank: Rank) -> list[Any]:
    """Return what is pending before worker 1 comes, and after. Runs in the pool."""
    store = connect(rank, timeout_s=60)
    with joined(rank, store, device=torch.device("cpu"), timeout_s=60):
        all_reduce_sum(torch.ones(5)).wait()
        wait_until(lambda: not CALLS.waits())  # the recorder hears of an end a moment after whoever waits for it
        if rank.index == 1:
            store.wait(["looked"])
        CALLS.note_bucket(7, 3)
        works = [all_reduce_sum(torch.ones(7)), all_reduce_sum(torch.ones(2, 3))]
        found = [(call.what, call.number, call.detail, call.members) for call in CALLS.waits()]
        before = CALLS.progress()
        if rank.index == 0:
            store.set("looked", "")
        for work in works:
            work.wait()
        wait_until(lambda: not CALLS.waits())
        return [found, CALLS.waits(), CALLS.entered()["group 0"], before != CALLS.progress() or rank.index == 1]


def test_collectives_of_the_engine_are_numbered_and_known_until_they_are_done(ranks: RankPool) -> None:
    first, second = ranks.run(in_a_group, workers=2)
    # If this fails, torch's recorder has changed: see shoal/comm/torch_private.py.
    assert first[0] == [("all-reduce", 2, "bucket 3", (0, 1)), ("all-reduce", 3, "shape (2, 3)", (0, 1))]
    assert first[1:] == [[], 3, True]
    assert second[1:] == [[], 3, True]


def in_memory(rank: Rank) -> list[int]:
    """Return how often each lane was entered after some collectives. Runs in the pool."""
    store = connect(rank, timeout_s=60)
    with join(store, index=rank.index, count=rank.workers, timeout_s=60) as group:
        before = dict(CALLS.entered())
        for _ in range(3):
            group.all_reduce(torch.ones(4))
        after = CALLS.entered()
        return [after[lane] - before[lane] for lane in before if lane.startswith("memory of 0-1: ")]


def test_bells_count_their_rings(ranks: RankPool) -> None:
    assert ranks.run(in_memory, workers=2) == [[3, 0], [3, 0]]

"""The link between workers: the arithmetic against its own formula, and real all-reduces."""

import pytest
import torch

from shoal.comm.algorithms.shared_inside import over_shared
from shoal.comm.group import joined
from shoal.comm.link import (
    MESSAGE_BYTES,
    agree_least,
    can_share_memory,
    link_from,
    time_all_reduces,
    time_inside,
    time_shared_shards,
    time_shared_sums,
)
from shoal.comm.rank import Rank
from shoal.comm.shm.group import join
from shoal.comm.store import connect
from tests.support.ranks import RankPool


@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("shared", [False, True])
def test_the_link_is_the_one_that_a_ring_of_such_times_has(workers: int, shared: bool) -> None:
    latency_s, bytes_per_s = 20e-6, 5e9
    rate = bytes_per_s * (2 / workers if shared else 1)
    times = [(size, 2 * (workers - 1) * (latency_s + size / workers / rate)) for size in MESSAGE_BYTES]
    link = link_from(times, workers=workers, shared=shared, source="computed")
    assert link.bytes_per_s == pytest.approx(bytes_per_s)
    assert link.latency_s == pytest.approx(latency_s, rel=0.1)  # the smallest message has 4 KB to carry, too
    assert link.overlaps is not shared


def measure(rank: Rank) -> tuple[float, list[tuple[int, float]]]:
    with joined(rank, connect(rank, timeout_s=60), device=torch.device("cpu"), timeout_s=60):
        return agree_least(float(rank.index + 3)), time_all_reduces(torch.device("cpu"), seconds=0.05)


def test_workers_time_their_all_reduces_and_agree_on_the_least(ranks: RankPool) -> None:
    answers = ranks.run(measure, workers=2)
    for least, times in answers:
        assert least == 3.0
        assert [size for size, _ in times] == list(MESSAGE_BYTES)
        assert min(seconds for _, seconds in times) > 0


def measure_memory(rank: Rank) -> list[list[tuple[int, float]]]:
    with join(connect(rank, timeout_s=60), index=rank.index, count=rank.workers, timeout_s=60) as group:
        inside = time_inside(group, over_shared(group), seconds=0.05, sizes=MESSAGE_BYTES)
        return [time_shared_sums(group, seconds=0.05), time_shared_shards(group, seconds=0.05), inside]


@pytest.mark.skipif(not can_share_memory(torch.device("cpu")), reason="shared memory between workers is Linux's")
def test_workers_time_what_shared_memory_takes(ranks: RankPool) -> None:
    for kinds in ranks.run(measure_memory, workers=3):
        for times in kinds:
            assert [size for size, _ in times] == list(MESSAGE_BYTES)
            assert min(seconds for _, seconds in times) > 0


def test_a_gpu_shares_no_memory_between_workers() -> None:
    assert not can_share_memory(torch.device("cuda"))

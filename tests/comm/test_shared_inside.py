"""Two levels with shared memory inside: held against the plain sum, for buckets of every size and kind in any order."""

import pytest
import torch
import torch.distributed as dist

from shoal.comm.algorithms import Wire, two_level_with
from shoal.comm.algorithms.shared_inside import over_shared
from shoal.comm.algorithms.two_level import levels
from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.shm.group import join
from shoal.comm.store import connect
from tests.support.ranks import RankPool

# In this order: buckets grow and shrink, so that rows are used again for other sizes, and made anew.
NUMELS = (1, 5, 100_003, 7, 70_000, 3, 250_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)


def made(worker: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, whose sums have no rounding in any dtype, so that results can be compared for equality."""
    return ((torch.arange(numel) * (worker + 1)) % 13 - 6).to(dtype)


def in_two_levels(rank: Rank, *, per_host: int) -> int:
    """Return how many sums were right, and fail at the first that is not. Runs in the pool."""
    store = connect(rank, timeout_s=60)
    host = rank.index // per_host
    with joined(rank, store, device=torch.device("cpu"), timeout_s=60):
        wire = Wire(dist.new_group(), hosts=[f"host {worker // per_host}" for worker in range(rank.workers)])
        own = dist.PrefixStore(f"host {host}", store)
        with join(own, index=rank.index % per_host, count=per_host, timeout_s=60) as group:
            inside, (_, between) = over_shared(group), levels(wire)
            for numel in NUMELS:
                for dtype in DTYPES:
                    tensor = made(rank.index, numel, dtype)
                    two_level_with(tensor, wire, inside=inside, between=between)
                    expected = torch.stack([made(worker, numel, dtype) for worker in range(rank.workers)]).sum(0)
                    assert torch.equal(tensor, expected), (numel, dtype)
        sent_bytes = between.sent_bytes
        del wire, between, inside
    return sent_bytes


@pytest.mark.parametrize(("workers", "per_host"), [(4, 2), (3, 3)])
def test_sums_are_those_of_all_workers_and_only_slices_leave_a_host(
    ranks: RankPool, workers: int, per_host: int
) -> None:
    sent = ranks.run(in_two_levels, workers=workers, per_host=per_host)
    hosts = workers // per_host
    all_bytes = sum(NUMELS) * sum(dtype.itemsize for dtype in DTYPES)
    # 2 (h-1)/h of what a host has goes to the others, but for parts that do not come out even.
    assert sum(sent) == pytest.approx(2 * (hosts - 1) * all_bytes, rel=1e-3)

"""What a worker leaves behind in its process when a run is over: nothing. Groups have threads that wake for ever."""

import gc
import threading
from pathlib import Path

import pytest

from shoal.comm.rank import Rank
from shoal.spec.plan import Batch, Mesh, Plan
from tests.support.parallel import record
from tests.support.ranks import RankPool

PLANS = {
    "ddp": Plan(mesh=Mesh(replicate=2)),
    "zero-3": Plan(mesh=Mesh(shard=2), zero=3),
    "tensor": Plan(mesh=Mesh(tensor=2)),
    "pipeline": Plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=2)),
}


def threads(rank: Rank) -> list[str]:
    """Return the names of this process's threads, those of engines included. Runs in the pool."""
    del rank
    gc.collect()
    assert threading.active_count() >= 1
    return sorted(path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm"))


def shared_maps(rank: Rank) -> int:
    """Return how many pieces of shared memory this process still has. Runs in the pool."""
    del rank
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:shoal")


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
def test_a_run_leaves_no_group_and_no_memory_behind(plan: Plan, ranks: RankPool, tmp_path: Path) -> None:
    before = ranks.run(threads, workers=2)
    for _ in range(2):
        record(ranks, "benchmarks.parallel_cases:gpt", plan, folder=tmp_path, steps=2, layers=4)
    for ours, theirs in zip(before, ranks.run(threads, workers=2), strict=True):
        grown = [name for name in theirs if "gloo" in name]
        assert grown == [name for name in ours if "gloo" in name]
    assert ranks.run(shared_maps, workers=2) == [0, 0]

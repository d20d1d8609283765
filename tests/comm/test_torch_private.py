"""What comm/ needs of torch in private: how long groups wait, and what DTensor remembers of groups that are gone."""

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from shoal.comm.collectives import subgroup
from shoal.comm.group import joined
from shoal.comm.mesh import data_group, device_mesh
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.comm.torch_private import forget_meshes, timeout_of
from shoal.spec.plan import Mesh
from tests.support.ranks import RankPool

CPU = torch.device("cpu")
LIMIT_S = 41.0  # neither torch's half an hour nor the 60 s of the group of all workers


def limits_s(rank: Rank) -> list[float]:
    """Return how long the groups of a mesh wait, and a group made out of one of them. Runs in the pool."""
    with joined(rank, connect(rank, timeout_s=60), device=CPU, timeout_s=60):
        mesh = device_mesh(Mesh(shard=rank.workers), CPU, timeout_s=LIMIT_S)
        groups = [*mesh.get_all_groups(), data_group(mesh), subgroup(mesh.get_group("shard"), range(rank.workers))]
        return [timeout_of(group) / timedelta(seconds=1) for group in groups]


def test_every_group_of_a_mesh_waits_as_long_as_it_is_told(ranks: RankPool) -> None:
    # Four axes, the data axis, and the group made of those of `shard`.
    assert ranks.run(limits_s, workers=2) == [[LIMIT_S] * 6] * 2


def summed_in_two_groups(rank: Rank, *, forgets: bool) -> list[float | str]:
    """Return a sum over `tensor` in a group of all workers and in one formed after it, or why there is none.

    torch numbers groups in the order they are formed, anew for each group of all workers: a few groups before the first
    mesh make sure that no group of the second has the name of one of the first. Runs in the pool.
    """
    store, sums = connect(rank, timeout_s=60), list[float | str]()
    forget_meshes()  # what other tests left behind in this process
    with patch("shoal.comm.group.forget_meshes", forget_meshes if forgets else lambda: None):
        for others in (10, 0):
            with joined(rank, dist.PrefixStore(f"{others}", store), device=CPU, timeout_s=60):
                for _ in range(others):
                    dist.new_group([0], timeout=timedelta(seconds=60))
                mesh = device_mesh(Mesh(shard=2, tensor=2), CPU, timeout_s=60)["tensor"]
                parts = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
                try:
                    total: Any = parts.sum()
                    sums.append(total.full_tensor().item())
                except RuntimeError as error:
                    sums.append(str(error))
    forget_meshes()
    return sums


def test_dtensor_works_in_a_second_group_once_it_has_forgotten_the_first(ranks: RankPool) -> None:
    assert ranks.run(summed_in_two_groups, workers=4, forgets=True) == [[6.0, 6.0]] * 4


def test_without_forgetting_dtensor_goes_on_with_groups_that_are_gone(ranks: RankPool) -> None:
    """When this fails, torch has learned to forget by itself: forget_meshes can go."""
    for first, second in ranks.run(summed_in_two_groups, workers=4, forgets=False):
        assert first == 6.0
        assert "Could not resolve the process group registered under the name" in str(second)

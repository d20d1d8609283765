"""What comm/ needs of torch in private.

How long groups wait, what DTensor remembers of groups that are gone, which connections are Gloo's and how to end them.
"""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor

from shoal.comm import torch_private
from shoal.comm.collectives import subgroup
from shoal.comm.failure import is_peer_failure
from shoal.comm.group import joined, new_group
from shoal.comm.mesh import data_group, device_mesh
from shoal.comm.rank import Rank
from shoal.comm.store import LOOPBACK, connect, host_store
from shoal.comm.torch_private import (
    abandon_groups,
    backend_name,
    calm_gloo,
    cuttable_connection,
    end_operations,
    forget_meshes,
    free_abandoned_groups,
    gloo_sockets,
    has_abandoned_groups,
    own_connection,
    store_of,
    timeout_of,
)
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


def limit_of_another_s(rank: Rank) -> float:
    """Return how long another group of all workers waits. Runs in the pool."""
    with joined(rank, connect(rank, timeout_s=60), device=CPU, timeout_s=LIMIT_S):
        return timeout_of(new_group()) / timedelta(seconds=1)


def test_another_group_of_all_workers_waits_as_long_as_the_first(ranks: RankPool) -> None:
    assert ranks.run(limit_of_another_s, workers=2) == [LIMIT_S] * 2


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


def carriers(rank: Rank) -> tuple[str, str, int, bytes]:
    """Return who carries what, how many connections Gloo has, and what comes back from the group's store."""
    store = connect(rank, timeout_s=60)
    before = gloo_sockets() or []  # of groups that other tests have left in this process
    with joined(rank, store, device=CPU, timeout_s=60), socket.create_server(("127.0.0.1", 0)) as server:
        # Others' connections, which are not to be taken for Gloo's.
        with socket.create_connection(server.getsockname()), server.accept()[0]:
            found = gloo_sockets()
        assert found is not None
        assert set(before) < set(found)
        own_connection(store_of(dist.group.WORLD)).set(f"key {rank.index}", "value")
        names = [backend_name(dist.group.WORLD, torch.device(kind)) for kind in ("cpu", "cuda")]
        return names[0], names[1], len(found) - len(before), store_of(dist.group.WORLD).get(f"key {rank.index}")


def test_gloo_has_a_connection_to_each_other_worker_and_these_are_found(ranks: RankPool) -> None:
    cpu, cuda, connections, value = zip(*ranks.run(carriers, workers=3), strict=True)
    assert cpu == ("gloo",) * 3
    assert set(cuda) <= {"", "gloo"}
    assert connections == (2,) * 3
    assert value == (b"value",) * 3


def ended(rank: Rank, *, operation: str) -> bool:
    """Return whether an operation that nobody answers fails as that of a lost worker does, when it is ended."""
    store = connect(rank, timeout_s=60)
    with joined(rank, store, device=CPU, timeout_s=60):
        dist.barrier()
        if rank.index == 1:
            store.wait(["done"])
            return True
        thread = threading.Timer(0.5, end_operations)
        thread.start()
        with pytest.raises(RuntimeError) as raised:
            getattr(dist, operation)(torch.zeros(3), **({"src": 1} if operation == "recv" else {}))
        thread.join(60)
        store.set("done", "")
        return is_peer_failure(raised.value) and "Timed out" not in str(raised.value)


@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_pending_operations_can_be_made_to_fail(ranks: RankPool, operation: str) -> None:
    assert ranks.run(ended, workers=2, operation=operation) == [True, True]


def policies(rank: Rank) -> dict[str, set[int]]:
    """Return how threads are scheduled, by their names, once Gloo's are calmed."""
    with joined(rank, connect(rank, timeout_s=60), device=CPU, timeout_s=60):
        calm_gloo()
        found: dict[str, set[int]] = {}
        for thread in Path("/proc/self/task").iterdir():
            name = (thread / "comm").read_text().strip()
            found.setdefault(name, set()).add(os.sched_getscheduler(int(thread.name)))
        return found


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="batch threads are Linux's")
@pytest.mark.skipif(torch.__version__ < "2.12", reason="Gloo's threads have no name there, and stay as they are")
def test_gloos_threads_are_found_by_their_name_and_calmed_and_no_others(ranks: RankPool) -> None:
    for found in ranks.run(policies, workers=2):
        assert found.pop("gloo_tcp_loop") == {os.SCHED_BATCH}
        assert set.union(*found.values()) == {os.SCHED_OTHER}


def test_a_wait_in_the_store_ends_when_its_connection_is_cut() -> None:
    store, port = host_store(host=LOOPBACK, timeout_s=60)
    client = dist.TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=60))
    connection, cut = cuttable_connection(client)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(connection.get, "what never comes")
        store.set("something", "else")
        cut()
        with pytest.raises(dist.DistNetworkError):
            waiting.result(30)
    assert client.get("something") == b"else", "other connections are not cut"


def test_groups_can_be_formed_again_after_one_was_abandoned_and_after_one_could_not_be_formed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_private, "_has_abandoned", False)  # and so again afterwards
    store, _ = host_store(host=LOOPBACK, timeout_s=60)

    def form(name: str, *, workers: int, timeout_s: float) -> None:
        prefix, timeout = dist.PrefixStore(name, store), timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", store=prefix, rank=0, world_size=workers, timeout=timeout)

    form("first", workers=1, timeout_s=30)
    abandon_groups()
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError):
        form("nobody else comes", workers=2, timeout_s=0.2)
    abandon_groups()
    form("second", workers=1, timeout_s=30)
    try:
        assert dist.group.WORLD is not None
        assert dist.group.WORLD.group_name == "0", "its name is that of other workers, for whom nothing has failed"
    finally:
        dist.destroy_process_group()
    assert has_abandoned_groups()
    free_abandoned_groups()

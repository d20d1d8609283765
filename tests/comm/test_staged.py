"""Groups that stage their tensors, against plain Gloo: every operation, and the engines that are built on them.

Without a GPU the group is told to stage tensors of the processor. Gloo does the same sums on the same numbers in the
same order, so all results are equal to the last bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from shoal.comm.failure import is_peer_failure
from shoal.comm.group import _backend, joined
from shoal.comm.rank import Rank
from shoal.comm.staged import StagedGroup, staged_backend
from shoal.comm.store import connect
from tests.comm.staged_exercises import EXERCISES, as_lists
from tests.support.ranks import RankPool

CPU = torch.device("cpu")


@contextmanager
def group(rank: Rank, backend: str) -> Iterator[None]:
    """Be in a group of the kind `backend` for the length of a `with` block; "staged_cpu" stages all tensors."""
    if backend != "gloo":
        assert staged_backend(stages_cpu=backend == "staged_cpu") == backend
    store = connect(rank, timeout_s=60)
    with (
        patch("shoal.comm.group._backend", lambda *_: backend),
        joined(rank, store, device=CPU, timeout_s=60),
    ):
        assert isinstance(dist.group.WORLD, StagedGroup) is (backend != "gloo")
        yield


def exercise(rank: Rank, *, name: str, backend: str) -> Any:
    """Be one worker of `EXERCISES[name]` over the processor's tensors. Runs in the pool."""
    with group(rank, backend):
        return as_lists(EXERCISES[name](CPU))


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", EXERCISES)
def test_what_is_staged_ends_as_what_gloo_does_itself(ranks: RankPool, name: str, workers: int) -> None:
    gloo, staged = (ranks.run(exercise, workers=workers, name=name, backend=kind) for kind in ("gloo", "staged_cpu"))
    assert staged == gloo


@pytest.mark.parametrize("name", ["messages", "started_and_awaited", "redistributions", "hooked_ddp"])
def test_tensors_of_the_processor_go_straight_to_gloo(ranks: RankPool, name: str) -> None:
    gloo, straight = (ranks.run(exercise, workers=2, name=name, backend=kind) for kind in ("gloo", "staged"))
    assert straight == gloo


def loose(rank: Rank) -> None:
    """What staging allows and plain Gloo does not."""
    with group(rank, "staged_cpu"):
        base = torch.zeros(4, 6)
        base.t()[1:3].fill_(rank.index + 1)
        version = base._version
        dist.all_reduce(base.t()[1:3])  # not contiguous
        assert base.sum() == 3 * base.t()[1:3].numel()
        assert base._version == version  # as with NCCL: autograd counts no write
        message, arrived = torch.full((40_000,), float(rank.index)), torch.empty(40_000)
        works = [dist.isend(message, 1 - rank.index), dist.irecv(arrived, 1 - rank.index)]
        message.fill_(-1)
        for work in [*works, *works]:  # twice: the second returns at once
            assert work is not None
            assert work.wait()
        assert (arrived == 1 - rank.index).all()
        dist.broadcast(parameter := nn.Parameter(torch.full((3,), float(rank.index))), src=1)
        assert (parameter == 1).all()


def test_tensors_may_have_gaps_and_change_once_sent(ranks: RankPool) -> None:
    ranks.run(loose, workers=2)


def wait_for_nobody(rank: Rank, *, operation: str) -> list[tuple[bool, str]]:
    """Return, for two tries, whether the error is that of a lost worker, and what it says. Runs in the pool."""
    store = connect(rank, timeout_s=60)
    with group(rank, "staged_cpu"):
        dist.barrier()  # only now is the time short: the first connection may take long
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=0.5), dist.group.WORLD)
        if rank.index == 1:
            store.wait(["given up"])
            return []
        said = []
        for _ in range(2):
            with pytest.raises(RuntimeError) as raised:
                getattr(dist, operation)(torch.zeros(3), **({"src": 1} if operation == "recv" else {}))
            said.append((is_peer_failure(raised.value), str(raised.value)))
        store.set("given up", "")
        return said


@pytest.mark.parametrize("operation", ["all_reduce", "recv"])
def test_a_worker_that_waits_in_vain_gives_up_after_the_timeout(ranks: RankPool, operation: str) -> None:
    (first, second), _ = ranks.run(wait_for_nobody, workers=2, operation=operation)
    assert first[0], first[1]
    assert "500ms" in first[1]
    assert second[0], second[1]
    assert "Application timeout caused pair closure" in second[1]  # once given up, the connection is closed


def test_no_operation_of_torch_is_left_unstaged() -> None:
    """A new name in torch falls through to Gloo with the GPU's tensors: add it to the lists of staged.py."""
    takes_tensors = [
        name
        for name, method in vars(dist.ProcessGroup).items()
        if "Tensor" in (method.__doc__ or "") and not name.startswith("__")
    ]
    assert len(takes_tensors) > 15
    assert [name for name in takes_tensors if name not in vars(StagedGroup)] == []


@pytest.mark.parametrize(("gpus", "backend"), [(0, "staged"), (1, "staged"), (2, "cuda:nccl,cpu:gloo")])
def test_workers_that_share_a_gpu_are_staged(gpus: int, backend: str) -> None:
    rank = Rank(0, 2, 0, 2, "127.0.0.1", 1, store_is_hosted=True)
    with patch("torch.cuda.device_count", lambda: gpus):
        assert _backend(rank, torch.device("cuda", 0)) == backend
        assert _backend(rank, CPU) == "gloo"

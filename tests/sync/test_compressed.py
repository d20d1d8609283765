"""Gradients through a codec under DDP and FSDP2, against gradients computed without either.

The model does not change from step to step, its inputs do. So all that was ever given to the codec can be computed on
one worker, and must be what has arrived and what is pending, together.
"""

import functools
import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.collectives import subgroup
from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.compress.codecs import CODECS
from shoal.compress.collectives import GroupCollectives
from shoal.core.errors import PlanError
from shoal.parallel.shard import apply_shard
from shoal.sync.background import Background
from shoal.sync.compressed import CompressedAllReduce, compress_shards
from tests.compress.counted import Alone, feedback, numbers
from tests.support.ranks import RankPool

CPU = torch.device("cpu")
STEPS, WIDTH = 5, 50
SHARDING = [name for name, codec in CODECS.items() if codec.serves_shards]


class Layer(nn.Module):
    """Odd sizes, and parameters at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.up, self.down = nn.Linear(WIDTH, 61), nn.Linear(61, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, WIDTH), Layer(), Layer(), nn.Linear(WIDTH, 3))


def loss(module: nn.Module, worker: int, step: int) -> Tensor:
    """Return the loss of a worker's part of a step's batch: parts differ in size, and the loss is their sum."""
    x = numbers(4 + worker, 7, seed=10 * step + worker)
    return module(x).square().sum() / 10  # type: ignore[no-any-return]


def given(workers: int, worker: int | None = None) -> dict[str, np.ndarray]:
    """Return the gradients of all workers and steps, summed; by one process without an engine."""
    module = model()
    for step in range(STEPS):
        for each in range(workers) if worker is None else [worker]:
            loss(module, each, step).backward()  # type: ignore[no-untyped-call]
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


def accounts(arrived: dict[str, Tensor], codec: Any) -> dict[str, dict[str, np.ndarray]]:
    pending = codec.state_dict()["pending"]
    return {
        "arrived": {name: value.numpy() for name, value in arrived.items()},
        "pending": {name: value.numpy() for name, value in pending.items()},
    }


def replicated(rank: Rank, *, names: list[str]) -> dict[str, Any]:
    """Be one worker under DDP, with buckets of 10 kB; three or more exchange in the background. Runs in the pool."""
    answers = {}
    with joined(rank, connect(rank, timeout_s=60), device=CPU, timeout_s=60):
        assert dist.group.WORLD is not None
        own = subgroup(dist.group.WORLD, range(rank.workers))
        for name in names:
            module, codec, buckets = model(), feedback(name), itertools.count()
            replica = DistributedDataParallel(module, bucket_cap_mb=0.01, gradient_as_bucket_view=True)
            note = functools.partial(next, buckets)
            background = Background(timeout_s=60) if rank.workers > 2 else None
            hook = CompressedAllReduce(
                codec, dict(module.named_parameters()), GroupCollectives(own), background=background, on_bucket=note
            )
            replica.register_comm_hook(None, hook.hook)
            arrived = {key: torch.zeros_like(p) for key, p in module.named_parameters()}
            for step in range(STEPS):
                replica.zero_grad()
                loss(replica, rank.index, step).backward()  # type: ignore[no-untyped-call]
                for key, p in module.named_parameters():
                    assert p.grad is not None
                    arrived[key] = arrived[key] + p.grad
            if background is not None:
                background.close()
            assert next(buckets) > 2 * STEPS
            answers[name] = accounts(arrived, codec)
            del replica, hook
    return answers


def sharded(rank: Rank, *, names: list[str], zero: int) -> dict[str, Any]:
    """Be one worker under FSDP2. Runs in the pool."""
    answers = {}
    with joined(rank, connect(rank, timeout_s=60), device=CPU, timeout_s=60):
        mesh = init_device_mesh("cpu", (1, rank.workers), mesh_dim_names=("replicate", "shard"))
        for name in names:
            module, codec = model(), feedback(name)
            root = apply_shard(module, mesh, blocks=[module[1], module[2]], zero=zero)
            compress_shards(module, codec)
            arrived = {key: torch.zeros(p.shape) for key, p in module.named_parameters()}
            for step in range(STEPS):
                root.zero_grad()  # type: ignore[attr-defined]
                loss(module, rank.index, step).backward()  # type: ignore[no-untyped-call]
                for key, p in module.named_parameters():
                    arrived[key] += p.grad.full_tensor()  # type: ignore[union-attr]
            answers[name] = accounts(arrived, codec)
    return answers


def check(answers: list[dict[str, Any]], name: str) -> None:
    expected = given(len(answers))
    assert set(answers[0][name]["pending"]) == set(expected)
    for key, gradient in expected.items():
        arrived = answers[0][name]["arrived"][key]
        assert all(arrived.tobytes() == answer[name]["arrived"][key].tobytes() for answer in answers), (name, key)
        pending = sum(answer[name]["pending"][key] for answer in answers)
        # Some 20 additions in float32 of numbers up to the largest.
        np.testing.assert_allclose(arrived + pending, gradient, atol=20 * 2**-23 * max(1.0, np.abs(gradient).max()))


@pytest.mark.parametrize("workers", [2, 3])
def test_under_ddp_nothing_is_lost_while_buckets_are_made_anew(ranks: RankPool, workers: int) -> None:
    answers = ranks.run(replicated, workers=workers, names=list(CODECS))
    for name in CODECS:
        check(answers, name)
    expected = given(workers)
    for key, gradient in expected.items():  # and bf16 is near by itself: its 8 bits, of sums that partly cancel
        error = np.abs(answers[0]["bf16"]["arrived"][key] - gradient).max()
        assert error <= 2**-6 * np.abs(gradient).max()


@pytest.mark.parametrize(("workers", "zero"), [(2, 3), (3, 2)])
def test_under_fsdp_nothing_is_lost(ranks: RankPool, workers: int, zero: int) -> None:
    answers = ranks.run(sharded, workers=workers, names=SHARDING, zero=zero)
    for name in SHARDING:
        check(answers, name)


def test_a_codec_that_needs_whole_gradients_is_refused_with_shards() -> None:
    with pytest.raises(PlanError, match=f"Use zero=0, or one of {', '.join(SHARDING[:-1])} and {SHARDING[-1]}"):
        compress_shards(model(), feedback("powersgd"))


def failing(rank: Rank) -> str:
    """Be one worker whose collectives fail, under DDP; return what backward raises. Runs in the pool."""

    class Broken(Alone):
        def all_gather(self, tensor: Tensor, sizes: Any = None) -> list[Tensor]:
            raise ConnectionError("worker 7 is gone")

    with joined(rank, connect(rank, timeout_s=60), device=CPU, timeout_s=60):
        module = model()
        replica = DistributedDataParallel(module)
        background = Background(timeout_s=60)
        hook = CompressedAllReduce(feedback("int8"), dict(module.named_parameters()), Broken(), background=background)
        replica.register_comm_hook(None, hook.hook)
        try:
            loss(replica, rank.index, 0).backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return str(error)
        finally:
            background.close()
    return "nothing"


def test_a_failure_in_the_background_is_raised_by_backward(ranks: RankPool) -> None:
    assert all("worker 7 is gone" in answer for answer in ranks.run(failing, workers=2))

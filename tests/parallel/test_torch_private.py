"""What sharding needs of FSDP2 in private: the four places where a worker waits for communication."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from shoal.comm.group import joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.parallel import torch_private
from shoal.parallel.shard import apply_shard
from tests.support.ranks import RankPool


def waits(rank: Rank) -> dict[str, int]:
    """Return how often a step of a model with two sharded blocks waits, in each of the places. Runs in the pool."""
    counts: Counter[str] = Counter()

    @contextmanager
    def waiting(name: str) -> Iterator[None]:
        counts[name] += 1
        yield

    with joined(rank, connect(rank, timeout_s=60.0), device=torch.device("cpu"), timeout_s=60.0):
        mesh = init_device_mesh("cpu", (1, rank.workers), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        # Each place gets its own name in the counts.
        with patch.object(torch_private, "timed", lambda f, _: _named(f, waiting)):
            apply_shard(model, mesh, blocks=list(model)[:2], zero=3, waiting=lambda: waiting(""))
        model(torch.ones(2, 4)).sum().backward()
    return dict(counts)


def _named(function: Callable[..., Any], waiting: Callable[[str], AbstractContextManager[None]]) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        with waiting(function.__name__):
            return function(*args, **kwargs)

    return timed


def test_every_wait_of_the_engine_is_seen(ranks: RankPool) -> None:
    for counts in ranks.run(waits, workers=2):
        assert counts.keys() == set(torch_private.WAITS)
        assert counts["wait_for_unshard"] >= 2 * 3, "each group in forward and backward"
        assert counts["post_backward"] >= 3

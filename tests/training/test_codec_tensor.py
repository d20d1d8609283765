"""A codec under ZeRO with a tensor axis: what the workers of that axis hold alike stays alike."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.parallel.layout import local_of
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.opening import open_run
from tests.support.jobs import linear
from tests.support.ranks import RankPool
from tests.support.training import bare_folder

MESH = Mesh(shard=2, tensor=2)
ALIKE = ("0.weight", "0.bias", "3.bias")


def divided() -> Job:
    """A job with layers that the tensor axis divides, and a norm and a bias that it does not."""
    return linear(
        steps=20,
        model=lambda: nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 80), nn.Tanh(), nn.Linear(80, 1)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        tensor_plan={"1": "column", "3": "row"},
    )


def held(rank: Rank, *, plan: Plan, folder: Path) -> dict[str, Tensor]:
    """Be one worker; return what it holds in the end of the parameters that are not divided. Runs in the pool."""
    log = EventLog(RunFolder(folder).events_of(rank.index))
    try:
        with open_run(divided(), RunFolder(folder), rank=rank, store=connect(rank, timeout_s=60), log=log) as run:
            for batch in run.batches():
                run.step(batch)
            parameters = dict(run.model.named_parameters())
            return {name: local_of(parameters[name].detach()).clone() for name in ALIKE}
    finally:
        log.close()


@pytest.mark.parametrize("codec", ["int8", "sign", "topk"])
def test_what_is_not_divided_is_the_same_on_all_workers_of_the_tensor_axis(
    codec: str, ranks: RankPool, tmp_path: Path
) -> None:
    plan = Plan(mesh=MESH, zero=2, sync=Sync(codec=codec))
    of_workers = ranks.run(held, workers=4, plan=plan, folder=bare_folder(tmp_path, plan))
    for first, second in (of_workers[:2], of_workers[2:]):  # of one shard each
        for name in ALIKE:
            assert torch.equal(first[name], second[name]), name

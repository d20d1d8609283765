"""Collectives that differ are named in the first step of a process, instead of aborting it."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from shoal.spec.job import Job
from shoal.spec.plan import Checkpoints, Mesh, Plan
from tests.support.jobs import linear
from tests.support.ranks import RankPool, WorkerError
from tests.support.training import bare_folder, train_part

TWO = Plan(mesh=Mesh(replicate=2), checkpoint=Checkpoints(every_steps=2))


def talking(steps: int, more: int) -> Job:
    """The regression of `linear`; its loss sums 3 numbers over the workers, and worker 1 gives `more`."""

    def loss(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        dist.all_reduce(torch.zeros(3 + more * dist.get_rank()))
        return F.mse_loss(output[:, 0], batch[1])

    return linear(steps=steps, loss=loss)


def train(ranks: RankPool, folder: Path, *, steps: int, more: int = 0) -> None:
    arguments = {"steps": steps, "more": more}
    ranks.run(train_part, workers=2, builder=f"{__name__}:talking", arguments=arguments, plan=TWO, folder=folder)


@pytest.mark.parametrize("done", [0, 2], ids=["at the beginning", "after a resume"])
def test_who_calls_another_collective_is_named(done: int, ranks: RankPool, tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, TWO)
    if done:
        train(ranks, folder, steps=done)
    with pytest.raises(WorkerError) as raised:
        train(ranks, folder, steps=done + 2, more=1)
    assert "the workers call different collectives as #" in str(raised.value)
    assert "all-reduce of float32 (4,)" in str(raised.value)

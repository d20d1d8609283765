"""What `shoal verify` says where two runs differ: is it the plan, or is it rounding?"""

from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from shoal.cli.verify import describe
from shoal.core.run_folder import RunFolder
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan
from shoal.training.verify import Verdict, compare_runs
from tests.support.parallel import record
from tests.support.ranks import RankPool

HERE = "tests.training.test_verify"


def norms(permille: int = 50, doubled: int = 0) -> Job:
    """Return a job with a learning rate of so many thousandths, whose first batch norm stands before another.

    What the first's bias adds, the second takes away: its gradient is 0, but for rounding.
    """
    rows = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))

    def model() -> nn.Module:
        layers = [nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Tanh()]
        return nn.Sequential(*layers, nn.Linear(24, 4))

    return Job(
        model=model,
        loss=lambda output, batch: F.mse_loss(output, batch[1]) * (2 if doubled else 1),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=permille / 1000, momentum=0.9),
        data=torch.utils.data.TensorDataset(rows, rows[:, :4].square()),
        batch_size=16,
        steps=8,
        clip_norm=1.0,  # a training that enlarges rounding stays finite
    )


def runs(ranks: RankPool, folder: Path, *, permille: int = 50, doubled: int = 0) -> tuple[RunFolder, ...]:
    """Return a run of one process, one with its weights cut over two workers, and one of one process, nudged."""
    case = f"{HERE}:norms"
    one = record(ranks, case, Plan(), folder=folder, permille=permille)
    cut = record(ranks, case, Plan(mesh=Mesh(shard=2), zero=3), folder=folder, permille=permille, doubled=doubled)
    return one, cut, record(ranks, case, Plan(), folder=folder, recorded="nudged", permille=permille)


def said(verdict: Verdict) -> str:
    return " ".join(describe(verdict))


def test_what_only_rounding_has_moved_is_found_by_moving_it_again(ranks: RankPool, tmp_path: Path) -> None:
    one, cut, nudged = runs(ranks, tmp_path)
    verdict = compare_runs(one, cut, nudged=nudged)
    assert verdict.equal, verdict.first
    assert 24 + 24 <= verdict.left_out < 0.1 * verdict.numbers  # two biases before a batch norm
    assert verdict.rounding is not None
    assert 0 < verdict.rounding < 1e-5  # the weights were moved, and by no more than rounding


def test_a_plan_that_trains_otherwise_is_said_to_be_more_than_rounding(ranks: RankPool, tmp_path: Path) -> None:
    one, cut, nudged = runs(ranks, tmp_path, doubled=1)
    verdict = compare_runs(one, cut, nudged=nudged)
    assert not verdict.equal
    assert "this is more than rounding" in said(verdict)


def test_a_training_that_enlarges_rounding_is_told_apart_from_a_wrong_plan(ranks: RankPool, tmp_path: Path) -> None:
    one, cut, nudged = runs(ranks, tmp_path, permille=1_000_000)
    verdict = compare_runs(one, cut, nudged=nudged)
    assert not verdict.equal
    assert "this training enlarges rounding" in said(verdict)
    assert "this training enlarges rounding" not in said(compare_runs(one, cut))

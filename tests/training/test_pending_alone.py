"""What a codec has not sent, where nobody is left to send it to: it reaches the model all the same, and once."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from shoal.comm.rank import Rank
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault.checkpoint.manifest import committed
from shoal.fault.checkpoint.reader import Checkpoint, read_whole
from shoal.spec.job import Job
from shoal.spec.plan import Checkpoints, Mesh, Plan
from shoal.spec.sync import Sync
from tests.support.jobs import linear
from tests.support.ranks import RankPool
from tests.support.training import bare_folder, reference, train_part
from tests.training.test_snapshots import PLANS, trained
from tests.training.test_snapshots import part as snapshot_part

STOPPED, MORE = 4, 3
RATE = 0.1
# Of float32, for numbers below 1: what sums in another order make.
TOLERANCE = 1e-6


def straight(steps: int, dtype: torch.dtype = torch.float32) -> Job:
    """A job whose gradients do not depend on its parameters: where these end is what they were given, summed."""
    job = linear(
        steps=steps,
        model=lambda: nn.Sequential(nn.Linear(5, 4)).to(dtype),
        loss=lambda output, batch: (output * torch.arange(1, 5) * batch[1][:, None]).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        tensor_plan={"0": "column"},
    )
    return dataclasses.replace(job, data=TensorDataset(*(tensor.to(dtype) for tensor in job.data.tensors)))


def part(rank: Rank, *, steps: int, plan: Plan, folder: Path) -> None:
    """Be one worker of the job. Runs in the pool."""
    train_part(rank, builder=f"{__name__}:straight", arguments={"steps": steps}, plan=plan, folder=folder)


def saved_after(ranks: RankPool, path: Path, plans: list[Plan]) -> dict[str, Tensor]:
    """Return what is saved last of a run in which each of `plans` goes on from what the one before has saved."""
    folder = bare_folder(path, plans[0])
    for number, plan in enumerate(plans):
        kept = dataclasses.replace(plan, checkpoint=Checkpoints(every_steps=1, keep=100))
        write_toml(RunFolder(folder).plan_toml, kept)
        steps = STOPPED + number * MORE
        ranks.run(part, workers=plan.workers, steps=steps, plan=kept, folder=folder)
    found = Checkpoint(committed(RunFolder(folder).checkpoints)[-1]).found
    return {name: read_whole(each) for name, each in found.items() if name.startswith(("model/", "codec/"))}


def missing(saved: dict[str, Tensor], steps: int) -> float:
    """Return by how much parameters, with what is owed to them, differ from what plain float64 brings, at most."""
    job = straight(steps, torch.float64)
    names = [name for name, _ in job.model().named_parameters()]
    expected = dict(zip(names, reference(job, steps).parameters, strict=True))
    owed = {name: sum(v for key, v in saved.items() if key.endswith(f"/pending/{name}")) for name in names}
    return max(float((saved[f"model/{n}"] - RATE * owed[n] - value).abs().max()) for n, value in expected.items())


def pending(saved: dict[str, Tensor]) -> float:
    """Return the largest number that a codec still owes."""
    return max((float(each.abs().max()) for name, each in saved.items() if "/pending/" in name), default=0.0)


TOPK = Sync(codec="topk")
CASES = {
    "replicas": (Plan(mesh=Mesh(replicate=3), sync=TOPK), Plan(sync=TOPK)),
    "ZeRO": (Plan(mesh=Mesh(shard=2), zero=2, sync=TOPK), Plan(sync=TOPK)),
    "auto": (Plan(mesh=Mesh(replicate=2), sync=TOPK), Plan(sync=Sync(codec="auto"))),
    "local steps": (
        Plan(mesh=Mesh(replicate=2), sync=Sync(mode="local", codec="topk", local_steps=2)),
        Plan(sync=Sync(mode="local", codec="topk", local_steps=2)),
    ),
    "tensor": (
        Plan(mesh=Mesh(shard=2, tensor=2), zero=2, sync=TOPK),
        Plan(mesh=Mesh(tensor=2), sync=TOPK),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_part_that_is_left_alone_gets_all_that_was_pending_in_its_first_step(
    case: str, ranks: RankPool, tmp_path: Path
) -> None:
    before, alone = CASES[case]
    (tmp_path / "stopped").mkdir()
    stopped = saved_after(ranks, tmp_path / "stopped", [before])
    assert pending(stopped) > 100 * TOLERANCE, "what is to be handed over can be told from rounding"
    saved = saved_after(ranks, tmp_path, [before, alone])
    assert missing(saved, STOPPED + MORE) < TOLERANCE
    assert pending(saved) == 0


def test_one_that_was_alone_for_a_while_loses_nothing_and_gives_nothing_twice(ranks: RankPool, tmp_path: Path) -> None:
    several, alone = CASES["replicas"]
    saved = saved_after(ranks, tmp_path, [several, alone, several])
    assert pending(saved) > 100 * TOLERANCE
    assert missing(saved, STOPPED + 2 * MORE) < TOLERANCE


def test_a_survivor_that_is_left_alone_keeps_what_it_has_not_sent(ranks: RankPool, tmp_path: Path) -> None:
    first = trained(ranks, PLANS["topk"], "adam", tmp_path, last=STOPPED, every="never", fails=True)
    folder = bare_folder(tmp_path, Plan(sync=TOPK))
    (second,) = ranks.run(
        snapshot_part, workers=1, folder=folder, case="adam", shared=tmp_path / "shared", generation=1, holders=1
    )
    own = {name: held[3] for name, held in first[0].last.items() if name.startswith("codec/0/pending/")}
    assert own
    assert all(torch.equal(second.first[name][3], value) for name, value in own.items())
    assert not any("/pending/" in name and bool(held[3].any()) for name, held in second.last.items())

"""Workers that would not train the same thing are told so before the first step, and who differs in what."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.errors import JobError
from shoal.fault.same import check_same, difference, facts_of, parameter_facts
from shoal.fault.same_samples import sample_hashes
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from tests.support.jobs import linear
from tests.support.ranks import RankPool
from tests.support.training import bare_folder, train_part

FOUR = Rank(0, 4, 0, 4, "", 0, store_is_hosted=True)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ([{"samples": 10_000}] * 3, ""),
        ([{"samples": n} for n in (10_000, 10_000, 10_001)], "worker 2 has 10,001 samples, the others 10,000"),
        ([{"samples": n} for n in (7, 8)], "worker 1 has 8 samples, worker 0 7"),
        (
            [{"torch": v} for v in ("2.13", "2.12", "2.13", "2.12", "2.13")],
            "workers 1 and 3 have torch 2.12, the others 2.13",
        ),
        (
            [{"parameter": {"w": "float32 (3,)"}}, {"parameter": {"w": "float32 (4,)"}}],
            "worker 1 has parameter w as float32 (4,), worker 0 float32 (3,)",
        ),
        (
            [{"parameter": {"w": "a"}}, {"parameter": {"w": "a"}}, {"parameter": {}}],
            "worker 2 has parameter w as none, the others a",
        ),
        (
            [{"sample": {"0": "x"}}, {"sample": {"0": "x"}}, {"sample": {"0": "y"}}],
            "worker 2 has other data: sample 0 is not that of the rest",
        ),
        ([{"sample": {"0": "x"}}, {"sample": {}}], ""),
    ],
)
def test_the_difference_names_who_and_in_what(facts: list[Any], expected: str) -> None:
    assert difference(facts) == expected


def test_a_jobs_facts_tell_jobs_apart() -> None:
    plan = Plan(mesh=Mesh(replicate=2))
    own = facts_of(linear(), plan, FOUR)
    assert difference([own, facts_of(linear(), plan, FOUR)]) == ""
    assert "samples" in difference([own, facts_of(linear(num_samples=51), plan, FOUR)])
    assert "Job.seed = 3" in difference([own, facts_of(linear(seed=3), plan, FOUR)])
    other = Plan(mesh=Mesh(replicate=2), precision="bf16")
    assert "plan.precision = bf16" in difference([own, facts_of(linear(), other, FOUR)])


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples with noise from everywhere, of which one cannot be read."""

    def __init__(self, offset: float = 0.0) -> None:
        self._offset, self._reads = offset, 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        self._reads += 1
        if index == 1:
            raise OSError("no such file")
        if index == 2:
            return {"never the same": self._reads}
        return {"x": torch.randn(3) + self._offset, "y": random.random(), "z": [b"1", None, "text"]}


def test_hashes_are_of_the_samples_and_not_of_their_noise() -> None:
    found = sample_hashes(Noisy())
    assert sorted(found) == ["0", "1"]
    assert found == sample_hashes(Noisy())
    assert found["0"] != sample_hashes(Noisy(1.0))["0"]
    assert found["1"] == "OSError"


def test_hashing_leaves_the_random_states_alone() -> None:
    torch.manual_seed(5)
    random.seed(5)
    expected = torch.rand(1).item(), random.random()
    torch.manual_seed(5)
    random.seed(5)
    sample_hashes(Noisy())
    assert (torch.rand(1).item(), random.random()) == expected


def compared(rank: Rank, *, width: int) -> str:
    """Return what comes of comparing a model that is wider on worker 2. Runs in the pool."""
    model = torch.nn.Linear(5, width if rank.index == 2 else 8)
    try:
        facts = parameter_facts(dict(model.named_parameters()))
        check_same(connect(rank, timeout_s=60), rank, facts, about="model", timeout_s=60)
    except JobError as error:
        return str(error)
    return ""


def test_all_workers_raise_the_same_sentence(ranks: RankPool) -> None:
    assert ranks.run(compared, workers=3, width=8) == [""] * 3
    found = ranks.run(compared, workers=3, width=9)
    assert len(set(found)) == 1
    assert "worker 2 has parameter weight as float32 (9, 5), the others float32 (8, 5)" in found[0]


def wide(width: int) -> Job:
    """A job whose model is so wide inside, and can be divided and cut."""
    model = lambda: torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))  # noqa: E731
    return linear(model=model, tensor_plan={"0": "column", "2": "row"})


def begun(rank: Rank, *, folder: Path, width: int) -> str:
    """Return what comes of a run whose model is wider on the last worker. Runs in the pool."""
    own = width if rank.index == rank.workers - 1 else 8
    try:
        train_part(rank, builder=f"{__name__}:wide", arguments={"width": own}, plan=Plan(), folder=folder)
    except JobError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "mesh",
    [Mesh(replicate=2), Mesh(shard=2), Mesh(tensor=2), Mesh(pipeline=2), Mesh(tensor=2, pipeline=2)],
    ids=["replicas", "ZeRO", "tensor", "pipeline", "both"],
)
def test_a_model_that_is_wider_on_one_worker_is_named_before_the_first_step_of_any_mesh(
    mesh: Mesh, ranks: RankPool, tmp_path: Path
) -> None:
    stages = ("2",) if mesh.pipeline > 1 else ()
    plan = Plan(mesh=mesh, zero=2 if mesh.shard > 1 else 0, batch=Batch(micro_batch=2), stages=stages)
    found = ranks.run(begun, workers=mesh.workers, folder=bare_folder(tmp_path, plan), width=16)
    assert len(set(found)) == 1
    rest = "worker 0" if mesh.workers == 2 else "the others"
    assert f"worker {mesh.workers - 1} has parameter 0.weight as float32 (16, 5), {rest} float32 (8, 5)" in found[0]

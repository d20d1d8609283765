"""A job whose data is a pack trains what the same job on the same samples in memory trains."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shoal.core.errors import ConfigError
from shoal.data.pack.progress import Quiet
from shoal.data.pack.writer import pack
from shoal.data.view import View
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from tests.data.packs import tokens_pack
from tests.support.ranks import RankPool
from tests.support.training import Trace, bare_folder, build, largest_difference, reference, train_part

STEPS = 14
NUM_ROWS = 50
# Float32 sums in another order differ by about 1e-7 of their size.
TOLERANCE = 1e-5


def numbers(row: int) -> dict[str, Any]:
    x = np.random.default_rng(row).standard_normal(5).astype(np.float32)
    return {"x": x, "y": np.float32(np.sin(x.sum()))}


def regression(*, path: str, block_rows: int | None = None) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)),
        inputs=lambda batch: batch["x"],
        loss=lambda output, batch: F.mse_loss(output[:, 0], batch["y"]),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        data=path,
        eval_data=path,
        batch_size=8,
        block_rows=block_rows,
        steps=STEPS,
    )


def language(*, path: str) -> Job:
    return Job(
        model=lambda: nn.Sequential(nn.Embedding(64, 8), nn.Linear(8, 64)),
        inputs=lambda batch: batch["tokens"][:, :-1] % 64,
        loss=lambda output, batch: F.cross_entropy(output.flatten(0, 1), (batch["tokens"][:, 1:] % 64).flatten()),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        data=View(path, window=9),
        batch_size=10,
        steps=STEPS,
    )


@pytest.fixture(scope="module")
def packs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("packs")
    pack([numbers(row) for row in range(NUM_ROWS)], folder / "rows.pack", part_bytes=400, report=Quiet())
    tokens_pack(folder / "tokens.pack", 40)
    return {"regression": str(folder / "rows.pack"), "language": str(folder / "tokens.pack")}


@pytest.fixture(scope="module")
def references(packs: dict[str, str]) -> dict[str, Trace]:
    return {name: reference(build(f"{__name__}:{name}", path=path), STEPS) for name, path in packs.items()}


@pytest.mark.parametrize(("workers", "shares"), [(1, ()), (3, ()), (3, (0.2, 0.5, 0.3))], ids=str)
@pytest.mark.parametrize("name", ["regression", "language"])
def test_a_pack_trains_the_same_with_any_number_of_workers(
    name: str,
    workers: int,
    shares: tuple[float, ...],
    packs: dict[str, str],
    references: dict[str, Trace],
    ranks: RankPool,
    tmp_path: Path,
) -> None:
    plan = Plan(mesh=Mesh(replicate=workers), batch=Batch(shares=shares))
    traces = ranks.run(
        train_part,
        workers=workers,
        builder=f"{__name__}:{name}",
        arguments={"path": packs[name]},
        plan=plan,
        folder=bare_folder(tmp_path, plan),
    )
    expected = references[name]
    assert largest_difference(traces[0].losses, expected.losses) <= TOLERANCE
    for step in range(STEPS):
        together = [sample for trace in traces for sample in trace.samples[step]]
        assert together == expected.samples[step]


def test_a_pack_is_named_by_its_path_and_counts_its_samples(packs: dict[str, str]) -> None:
    job = regression(path=packs["regression"])
    assert isinstance(job.data, View)
    assert isinstance(job.eval_data, View)
    assert job.steps_per_epoch == 7
    assert len(language(path=packs["language"]).data) == View(packs["language"], window=9).num_samples


def test_a_path_that_is_no_pack_is_refused_with_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Job.data: there is no pack .*nothing.pack. Make one with: shoal pack"):
        regression(path=str(tmp_path / "nothing.pack"))

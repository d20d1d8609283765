"""The promise: the number of workers changes how fast you train, never what you train."""

from pathlib import Path

import pytest
import torch

from shoal.spec.plan import Batch, Mesh, Plan
from tests.support.ranks import RankPool
from tests.support.training import Trace, bare_folder, build, largest_difference, reference, train_part

STEPS = 30
# Float32 sums in another order differ by about 1e-7 of their size; thirty optimizer steps may let that grow.
TOLERANCE = 1e-5
UNEQUAL = (0.25, 0.25, 0.10, 0.4)
SPLITS: list[tuple[int, tuple[float, ...]]] = [(1, ()), (2, ()), (3, ()), (4, ()), (4, UNEQUAL)]


@pytest.fixture(scope="module")
def references(request: pytest.FixtureRequest) -> dict[str, Trace]:
    full_size = request.config.getoption("--full-size")
    torch.manual_seed(0)
    return {
        name: reference(build(f"tests.support.jobs:{name}", full_size=full_size, steps=STEPS), STEPS)
        for name in ("gpt", "digits")
    }


@pytest.mark.parametrize("micro_batch", [None, 3], ids=lambda m: f"micro-batch {m}" if m else "whole part")
@pytest.mark.parametrize(("workers", "shares"), SPLITS, ids=str)
@pytest.mark.parametrize("name", ["gpt", "digits"])
def test_thirty_losses_of_the_examples_equal_those_of_one_process(
    name: str,
    workers: int,
    shares: tuple[float, ...],
    micro_batch: int | None,
    references: dict[str, Trace],
    ranks: RankPool,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    record_difference: "dict[str, float]",
) -> None:
    plan = Plan(mesh=Mesh(replicate=workers), batch=Batch(shares=shares, micro_batch=micro_batch))
    traces = ranks.run(
        train_part,
        workers=workers,
        builder=f"tests.support.jobs:{name}",
        arguments={"full_size": request.config.getoption("--full-size"), "steps": STEPS},
        plan=plan,
        folder=bare_folder(tmp_path, plan),
    )
    expected = references[name]
    for trace in traces:
        assert trace.losses == traces[0].losses, "every worker knows the same loss"
    difference = largest_difference(traces[0].losses, expected.losses)
    record_difference[f"{name:7} workers={workers} shares={shares or 'equal'} micro_batch={micro_batch}"] = difference
    assert difference <= TOLERANCE
    for step in range(STEPS):
        together = sorted(sample for trace in traces for sample in trace.samples[step])
        assert together == sorted(expected.samples[step])

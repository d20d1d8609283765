"""Random faults: runs that lose workers end, with the losses and the samples of a run that nothing disturbed.

The hundred of them, beside torchrun's restart: benchmarks/faults/hundred.py.
"""

from pathlib import Path

import pytest

from benchmarks.faults.hundred import make_pack
from benchmarks.faults.hundred_run import Trained, differences, recoveries, train
from shoal.fault.inject_random import random_faults
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Mesh, Plan

STEPS, APART = 160, 36


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_pack(tmp_path_factory.mktemp("samples"))


@pytest.fixture(scope="module")
def undisturbed(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    run = train(Plan(), pack=samples, steps=STEPS, folder=tmp_path_factory.mktemp("undisturbed") / "run")
    assert run.exit_code == 0, run.said
    return run


def test_a_run_that_loses_workers_ends_as_if_nothing_had_happened(
    samples: Path, undisturbed: Trained, tmp_path: Path
) -> None:
    workers, count = 3, 5
    plan = Plan(mesh=Mesh(shard=workers), zero=3, on_loss=OnLoss(restarts=count, snapshot="1"), timeout_s=60)
    faults = random_faults(workers, workers, STEPS - APART, count, apart=APART, spares=True)
    run = train(plan, pack=samples, steps=STEPS, folder=tmp_path / "run", faults=faults)
    assert differences(run, undisturbed, steps=STEPS) == []
    found = recoveries(run, workers=workers)
    assert len(found) >= 2  # one that waits for a worker who does not come back before the end strikes nobody
    assert all(each.lost_steps <= 1 for each in found)

"""`shoal verify` from end to end, and the flags that say how to train."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.plan_flags import add_plan_flags, read_plan
from shoal.cli.verify import describe
from shoal.core.errors import PlanError
from shoal.core.toml import write_toml
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.training.verify import Difference, Verdict
from tests.support.files import job_file

DEEPER = "fields['model'] = lambda: nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)))\n"


def verify(folder: Path, file: Path, *flags: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "shoal", "verify", str(file), "--steps", "4", *flags]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_a_sharded_run_is_said_to_be_equal(tmp_path: Path) -> None:
    done = verify(tmp_path, job_file(tmp_path, DEEPER), "--mesh", "shard=2", "--zero", "3", "--json")
    assert done.returncode == 0, done.stderr
    verdict = json.loads(done.stdout)
    assert verdict["equal"] is True
    assert verdict["steps"] == 4
    assert verdict["loss"] < 1e-6


def test_a_model_that_is_another_with_two_workers_is_found_out(tmp_path: Path) -> None:
    # Each worker adds its own number to the loss of its samples: no two numbers of workers train the same.
    spoiled = "fields['loss'] = lambda output, batch: ((output[:, 0] - batch[1] - max(worker, 0)) ** 2).mean()\n"
    done = verify(tmp_path, job_file(tmp_path, spoiled), "--workers", "2")
    assert done.returncode == 1, done.stderr
    said = done.stdout.replace("\n", " ")
    assert "DIFFERENT, first at step 1: loss is" in said
    assert "this is more than rounding" in said
    assert len(list((tmp_path / "runs").iterdir())) == 3


def test_a_plan_that_cannot_run_is_refused_before_any_process_starts(tmp_path: Path) -> None:
    done = verify(tmp_path, job_file(tmp_path, DEEPER), "--mesh", "pipeline=8", "--micro-batch", "1")
    assert done.returncode == 2
    assert "Use pipeline" in done.stderr
    assert not (tmp_path / "runs").exists()


def plan_of(*flags: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_plan_flags(parser)
    return read_plan(parser.parse_args(flags))


def test_flags_make_a_plan_by_themselves() -> None:
    assert plan_of("--mesh", "shard=2,tensor=2") == Plan(mesh=Mesh(shard=2, tensor=2), zero=3)
    assert plan_of("--mesh", "shard=4", "--zero", "1").zero == 1
    assert plan_of("--workers", "3") == Plan(mesh=Mesh(replicate=3))
    assert plan_of("--recompute", "full", "--compile") == Plan(recompute="full", compile=True)


def test_flags_override_the_plan_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    plan = Plan(mesh=Mesh(pipeline=2, shard=2), zero=2, batch=Batch(micro_batch=2), stages=("blocks.2",))
    write_toml(path, plan)
    assert plan_of("--plan", str(path)) == plan
    assert plan_of("--plan", str(path), "--micro-batch", "4").batch.micro_batch == 4
    other = plan_of("--plan", str(path), "--mesh", "pipeline=4")
    assert (other.mesh, other.zero, other.stages) == (Mesh(pipeline=4), 0, ())
    with pytest.raises(PlanError, match="8 workers for a plan of 4"):
        plan_of("--plan", str(path), "--workers", "8")


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ("shrad=2", "no axis. Did you mean 'shard'"),
        ("shard", "write each axis with its size"),
        ("shard=2,shard", "size"),
    ],
)
def test_a_mesh_that_is_none_is_explained(mesh: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plan_of("--mesh", mesh)


def test_the_verdict_names_the_first_difference_and_what_was_left_out() -> None:
    first = Difference(what="gradient of blocks.3.weight", step=7, one=1.0, plan=1.5, relative=0.5)
    verdict = Verdict(
        equal=False, steps=20, tolerance=1e-4, loss=1e-7, gradient_norm=0.2, parameter=0.1,
        parameter_name="blocks.3.weight", left_out=64, numbers=1000, first=first, rounding=None, one_run="runs/a",
        plan_run="runs/b",
    )  # fmt: skip
    text = "\n".join(describe(verdict))
    assert "DIFFERENT, first at step 7: gradient of blocks.3.weight is 1 in one process and 1.5" in text
    assert "64 of 1,000 numbers are left out" in text

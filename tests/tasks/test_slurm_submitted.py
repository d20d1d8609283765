"""Jobs of a map are what was submitted: their code is that of then, they are found again, and share a node's GPUs."""

import concurrent.futures
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.tasks.call import load_file
from shoal.tasks.map import map as shoal_map
from shoal.tasks.submitting import SlurmOptions
from shoal.tasks.sweep import Sweep
from shoal.tasks.sweep_slurm import run_sweep_on_slurm
from tests.support.slurm import SlurmCluster, sbatch_that_kills
from tests.support.waiting import wait_until
from tests.tasks import work

ROOT = Path(__file__).parents[2]
HELD = SlurmOptions(time_s=120, task_time_s=0.01, extra=("--hold",))
FREE = SlurmOptions(time_s=120, task_time_s=0.01)


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def write(folder: Path, module: str, body: str, *, text: str) -> Path:
    """Write a file with `body`, which imports `module`, and that module with `text`."""
    (folder / f"{module}.py").write_text(text)
    (folder / "f.py").write_text(f"import {module} as beside\n\n\n{body}")
    return folder / "f.py"


def release_after(slurm: SlurmCluster, edit: Path, what: "concurrent.futures.Future[Any]") -> Any:
    """Edit a module while the job waits, let the job go, and return what came of it."""
    wait_until(lambda: bool(slurm.run("squeue", "-h", "-t", "PD")) or what.done(), seconds=60)
    edit.write_text("raise RuntimeError('edited')\n")
    slurm.run("scontrol", "release", slurm.run("squeue", "-h", "-t", "PD", "-o", "%F").split()[0])
    return what.result(timeout=60)


def test_a_map_runs_the_code_that_it_was_submitted_with(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, "beside_map", "def f(item):\n    return item + beside.more\n", text="more = 5\n")
    function = load_file(str(file)).f
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        started = thread.submit(shoal_map, function, range(3), folder=tmp_path / "kept", slurm=HELD)
        assert release_after(slurm, tmp_path / "beside_map.py", started) == [5, 6, 7]


def test_what_failed_is_tried_again_with_the_code_that_was_mended_since(slurm: SlurmCluster, tmp_path: Path) -> None:
    file = write(
        tmp_path, "beside_mended", "def f(item):\n    return beside.half(item)\n", text="def half(n): return n/0"
    )
    function = load_file(str(file)).f
    found = shoal_map(function, [4], folder=tmp_path / "kept", slurm=FREE, on_error="return")
    assert isinstance(found[0], ZeroDivisionError)
    (tmp_path / "beside_mended.py").write_text("def half(n): return n // 2")
    assert shoal_map(function, [4], folder=tmp_path / "kept", slurm=FREE) == [2]
    assert sorted(path.name for path in (tmp_path / "kept" / "code").iterdir()) == ["1", "2"]


def test_a_sweep_tries_the_code_that_it_was_submitted_with(
    slurm: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    body = "def objective(trial):\n    return trial.suggest_float('x', 0, 1) + beside.more\n"
    file = write(tmp_path, "beside_sweep", body, text="more = 5\n")
    sweep = Sweep(file=file, folder=tmp_path / "sweep", trials=2)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        started = thread.submit(run_sweep_on_slurm, sweep, HELD)
        result = release_after(slurm, tmp_path / "beside_sweep.py", started)
    assert all(5 <= (trial.value or 0) <= 6 for trial in result.trials)
    assert result.done == 2


def test_a_job_whose_submitter_was_killed_before_it_noted_the_number_is_gone_on_with(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    file = write(tmp_path, "beside_found", "def f(item):\n    return beside.seven\n", text="seven = 7\n")
    asked = [f"{file}:f", "range:0:4", "--out", str(tmp_path / "found"), "--slurm", "--task-time", "1ms", "--json"]
    command = [sys.executable, "-m", "shoal", "map", *asked]
    path = f"{sbatch_that_kills(tmp_path)}:{os.environ['PATH']}"
    killed = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, timeout=60, check=False)
    assert killed.returncode == -9
    assert not list((tmp_path / "found" / "jobs").glob("*.job"))
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert json.loads(done.stdout)["failed"] == 0, done.stderr
    assert len(slurm.run("squeue", "-h", "--states=all", "--name=map-found").splitlines()) == 1


def test_tasks_that_run_at_once_have_a_gpu_of_a_fake_list_each(slurm: SlurmCluster, tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text('setup = ["export CUDA_VISIBLE_DEVICES=6,7"]\n')
    options = SlurmOptions(time_s=120, task_time_s=0.02, site=tmp_path / "site.toml")
    found = shoal_map(work.gpus_and_process, [0.02] * 30, folder=tmp_path / "kept", slurm=options, workers=2)
    assert {gpus for gpus, _ in found} == {"6", "7"}
    assert len(set(found)) == 2

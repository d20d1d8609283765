"""A sweep on a real Slurm: a few jobs, and a start that goes on with what an earlier one left."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.tasks.bunch import Room
from shoal.tasks.submitting import SlurmOptions
from shoal.tasks.sweep import Sweep
from shoal.tasks.sweep_slurm import run_sweep_on_slurm
from shoal.tasks.sweep_study import Search
from tests.support.slurm import SlurmCluster
from tests.support.waiting import wait_until
from tests.tasks.sweep_files import GRID, write

TIMEOUT_S = 100.0
OPTIONS = SlurmOptions(time_s=300, task=Room(1), task_time_s=0.2)

SLOW = """
import pathlib, time
def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    folder = pathlib.Path(__file__).parent
    (folder / f"begun-{trial.number}").touch()
    while trial.number == 4 and not (folder / "go").exists():
        time.sleep(0.01)
    return x
"""


def test_the_points_of_a_grid_are_tried_once_each_in_few_jobs(slurm: SlurmCluster, tmp_path: Path) -> None:
    search = Search(sampler="grid", seed=0)
    sweep = Sweep(file=write(tmp_path, GRID), folder=tmp_path / "a 'sweep'", trials=8, search=search)
    result = run_sweep_on_slurm(sweep, OPTIONS, at_once=1)
    assert sorted((t.parameters["a"], t.parameters["b"]) for t in result.trials) == [
        (a, b) for a in ("one", "two") for b in range(3)
    ]
    assert {trial.state for trial in result.trials} == {"complete"}
    assert json.loads((sweep.folder / "sweep.json").read_text())["complete"] == 6


def test_a_submitting_process_that_is_killed_leaves_the_jobs_and_the_next_start_takes_what_they_did(
    slurm: SlurmCluster, tmp_path: Path
) -> None:
    file, folder = write(tmp_path, SLOW), tmp_path / "sweep"
    asked = ["sweep", str(file), "--trials", "8", "--slurm", "--time", "5m", "--at-once", "2", "--folder", str(folder)]
    settings: dict[str, Any] = {"env": os.environ | slurm.env, "cwd": tmp_path, "stdout": subprocess.PIPE}
    killed = subprocess.Popen([sys.executable, "-m", "shoal", *asked], **settings)
    wait_until((tmp_path / "begun-4").exists, seconds=TIMEOUT_S)
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=TIMEOUT_S)
    (tmp_path / "go").touch()
    again = [sys.executable, "-m", "shoal", *asked, "--json"]
    found = json.loads(subprocess.run(again, check=True, timeout=TIMEOUT_S, **settings).stdout)
    assert (found["complete"], found["failed"], len(found["trials"])) == (8, 0, 8)
    assert [path.name for path in sorted(folder.glob("round-*"))] == ["round-1"]


@pytest.mark.parametrize("flag", ["--time", "--partition"])
def test_flags_of_a_cluster_without_slurm_are_refused(tmp_path: Path, flag: str) -> None:
    from shoal.cli.main import main

    assert main(["sweep", str(write(tmp_path, GRID)), "--trials", "3", flag, "5m"]) == 2

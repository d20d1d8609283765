"""`shoal sweep` as people run it: real workers, real training runs, the table and the page."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.cli.sweep import trains
from shoal.tasks.sweep_study import JOURNAL
from tests.support.waiting import wait_until
from tests.tasks.sweep_files import BOWL, write

TIMEOUT_S = 60.0
COMMAND = [sys.executable, "-m", "shoal", "sweep"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["sweep", *arguments, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_trials_run_at_once_in_several_processes_and_each_counts_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(
        tmp_path, BOWL.replace("    return", '    trial.set_user_attr("pid", __import__("os").getpid())\n    return')
    )
    folder = str(tmp_path / "sweep")
    found = answer(capsys, str(file), "--trials", "12", "--at-once", "2", "--folder", folder)
    assert (found["complete"], found["failed"], len(found["trials"])) == (12, 0, 12)
    assert found["best"]["value"] == min(trial["value"] for trial in found["trials"])
    more = answer(capsys, str(file), "--trials", "15", "--folder", folder)
    assert more["trials"][:12] == found["trials"]
    assert more["complete"] == 15


def test_a_trial_whose_process_dies_is_made_up_for_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'import os\ndef objective(trial):\n    x = trial.suggest_float("x", 0, 1)\n'
    file = write(tmp_path, text + "    if trial.number == 1:\n        os._exit(3)\n    return x\n")
    found = answer(capsys, str(file), "--trials", "4", "--at-once", "1", "--folder", str(tmp_path / "sweep"))
    assert [trial["state"] for trial in found["trials"]] == ["complete", "fail", "complete", "complete", "complete"]
    assert found["trials"][1]["reason"] == "the process that ran it died"
    assert found["trials"][2]["parameters"] == found["trials"][1]["parameters"]


def test_the_best_trials_are_shown_and_the_page_has_every_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'def objective(trial):\n    x = trial.suggest_float("<b>rate", 1e-5, 1, log=True)\n'
    text += '    return x if trial.suggest_categorical("kind", ["[red]", None]) else 2 * x\n'
    file = write(tmp_path, text, "my tune.py")
    assert main(["sweep", str(file), "--trials", "6", "--at-once", "1", "--folder", str(tmp_path / "it")]) == 0
    printed, progress = capsys.readouterr()
    assert "6 trials of my tune.py: best " in printed
    assert "[red]" in printed
    assert "trial 6/6  best " in progress
    page = (tmp_path / "it" / "report.html").read_text()
    assert "&lt;b&gt;rate" in page
    assert "<b>rate" not in page
    assert '"type":"log"' in page
    assert '"type":"category"' in page


HELD = """
import pathlib, time
def objective(trial):
    pathlib.Path(f"{trial.number}").touch()
    while trial.number == 2 and not pathlib.Path("again").exists():
        time.sleep(0.01)
    return 0
"""


def test_values_and_choices_that_are_infinite_are_shown_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = 'def objective(trial):\n    return trial.suggest_categorical("x", [float("inf"), 1.0]) * float("inf")\n'
    found = answer(capsys, str(write(tmp_path, text)), "--trials", "3", "--folder", str(tmp_path / "it"))
    assert found["best"]["value"] == "inf"
    assert "inf in trial 0 is the best" in (tmp_path / "it" / "report.html").read_text()


def test_sigterm_ends_a_sweep_with_75_and_the_same_command_goes_on(tmp_path: Path) -> None:
    file = write(tmp_path, HELD)
    asked = [*COMMAND, str(file), "--trials", "4", "--at-once", "1"]
    stopped = subprocess.Popen(asked, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "2").exists, seconds=TIMEOUT_S)
    stopped.send_signal(signal.SIGTERM)
    _, said = stopped.communicate(timeout=TIMEOUT_S)
    assert stopped.returncode == 75
    assert "has what is done. The same command goes on from there." in said
    assert json.loads((tmp_path / "runs/it-sweep/sweep.json").read_text())["complete"] == 2
    (tmp_path / "again").touch()
    subprocess.run(asked, cwd=tmp_path, check=True, capture_output=True, timeout=TIMEOUT_S)
    written = json.loads((tmp_path / "runs/it-sweep/sweep.json").read_text())
    assert [trial["state"] for trial in written["trials"]] == ["complete", "complete", "fail", "complete", "complete"]


TRAINED = """
import torch, shoal
from torch.utils.data import TensorDataset
data = TensorDataset(torch.linspace(-1, 1, 64)[:, None], torch.linspace(-2, 2, 64)[:, None])
def job(trial):
    rate = trial.suggest_categorical("rate", [0.5])
    return shoal.Job(
        model=lambda: torch.nn.Linear(1, 1),
        loss=lambda out, batch: ((out - batch[1]) ** 2).mean(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=rate),
        data=data, eval_data=data, eval_every_steps=10, batch_size=32, steps=40, seed=3,
    )
"""


def test_each_trial_is_a_training_run_with_its_own_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, folder = write(tmp_path, TRAINED), tmp_path / "sweep of 'it'"
    flags = ["--sampler", "grid", "--workers", "1", "--metric", "loss"]
    found = answer(capsys, str(file), "--trials", "9", "--folder", str(folder), *flags)
    (trial,) = found["trials"]
    run = folder / "trials" / "trial-0"
    assert (run / "plan.toml").is_file()
    assert json.loads((run / "result.json").read_text())["status"] == "done"
    events = [json.loads(line) for line in (run / "events/rank-0.jsonl").read_text().splitlines()]
    assert trial["value"] == [event["metrics"]["loss"] for event in events if event["kind"] == "eval"][-1] < 0.1


def test_whether_trials_are_training_runs_is_read_off_the_file_without_running_it(tmp_path: Path) -> None:
    assert trains(write(tmp_path, "def job(trial): ...\nraise SystemExit"))
    assert not trains(write(tmp_path, "def objective(trial): ..."))
    assert not trains(write(tmp_path, "def ("))


def test_what_cannot_be_is_refused_before_anything_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(write(tmp_path, BOWL))
    for arguments, words in (
        ([str(tmp_path / "no.py"), "--trials", "3"], "there is no file"),
        ([file, "--trials", "0"], "--trials 0"),
        ([file, "--trials", "3", "--at-once", "-1"], "--at-once -1"),
        ([file, "--trials", "3", "--sampler", "x"], "--sampler 'x' is none"),
        ([file, "--trials", "3", "--workers", "0"], "--workers 0"),
        ([file, "--trials", "3", "--plan", "no.toml"], "there is no file no.toml"),
        ([file, "--trials", "3", "--folder", file], "cannot be the folder of a sweep"),
    ):
        assert main(["sweep", *arguments]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert not Path("runs", "it-sweep", JOURNAL).exists()

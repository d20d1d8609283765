"""Sweeps: what is tried, what is tried again, and what is left when everything dies."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, JobError
from shoal.tasks.sweep import Sweep, run_sweep
from shoal.tasks.sweep_result import SweepResult
from shoal.tasks.sweep_study import JOURNAL, Search
from tests.support.waiting import wait_until
from tests.tasks.sweep_files import BOWL, GRID, PRUNED, write

TIMEOUT_S = 60.0


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of trials a test, five times to the disk each: on a busy one, that is all that would take time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


class Here(Executor):
    """Runs each task at once, in this process: what a sweep decides does not depend on where its tasks run."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> "Future[Any]":
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def swept(file: Path, trials: int, folder: Path | None = None, **settings: Any) -> SweepResult:
    own = {name: settings.pop(name) for name in ("metric", "train_flags") if name in settings}
    sweep = Sweep(file=file, folder=folder or file.parent / "sweep", trials=trials, search=Search(**settings), **own)
    return run_sweep(sweep, Here)


def tried(result: SweepResult) -> list[dict[str, Any]]:
    return [trial.parameters for trial in result.trials]


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes"])
def test_with_a_seed_and_one_at_a_time_the_same_is_tried_again(tmp_path: Path, sampler: str) -> None:
    file = write(tmp_path, BOWL)
    first, again, other = (
        swept(file, 14, tmp_path / str(number), sampler=sampler, seed=seed) for number, seed in enumerate((7, 7, 8))
    )
    assert tried(first) == tried(again)
    assert tried(first) != tried(other)
    assert len({str(parameters) for parameters in tried(first)}) == 14


def test_a_sweep_in_two_goes_tries_what_it_tries_in_one(tmp_path: Path) -> None:
    file = write(tmp_path, BOWL)
    whole = swept(file, 14, tmp_path / "whole", seed=3)
    swept(file, 6, tmp_path / "halves", seed=3)
    assert tried(swept(file, 14, tmp_path / "halves", seed=3)) == tried(whole)


def test_more_trials_find_a_better_value(tmp_path: Path) -> None:
    result = swept(write(tmp_path, BOWL), 40, seed=0)
    assert result.best is not None
    assert result.best.value is not None
    assert result.best.value < 0.5
    assert result.ranked()[0] == result.best
    written = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert written == result.as_json()
    assert written["complete"] == 40


def test_the_best_of_a_sweep_that_maximizes_is_the_highest(tmp_path: Path) -> None:
    result = swept(write(tmp_path, BOWL), 8, sampler="random", is_maximized=True, seed=1)
    assert result.best is not None
    assert result.best.value == max(trial.value or 0.0 for trial in result.trials)


def test_a_grid_ends_when_everything_was_tried_once(tmp_path: Path) -> None:
    file = write(tmp_path, GRID)
    result = swept(file, 100, sampler="grid", seed=0)
    assert sorted((each["a"], each["b"]) for each in tried(result)) == [
        (a, b) for a in ("one", "two") for b in range(3)
    ]
    assert len(swept(file, 100, sampler="grid", seed=0).trials) == 6


@pytest.mark.parametrize("pruner", ["median", "hyperband"])
def test_trials_that_are_worse_are_pruned_and_count_as_done(tmp_path: Path, pruner: str) -> None:
    result = swept(write(tmp_path, PRUNED), 30, sampler="random", pruner=pruner, seed=0)
    assert 0 < result.count("pruned") < 30
    assert result.done == 30


def test_without_a_pruner_none_is_pruned(tmp_path: Path) -> None:
    assert swept(write(tmp_path, PRUNED), 12, pruner="none", seed=0).count("complete") == 12


def test_a_trial_that_raises_fails_with_its_line_and_is_made_up_for_at_the_next_start(tmp_path: Path) -> None:
    file = write(tmp_path, 'def objective(trial):\n    assert trial.number != 2, "unlucky"\n    return 1\n')
    result = swept(file, 4)
    assert (result.done, result.count("fail")) == (3, 1)
    assert result.trials[2].reason == "it.py:2 raises AssertionError: unlucky"
    assert swept(file, 4).done == 4


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def objective(trial):\n    return 'much'", "returns 'much', not a number"),
        ("def objective(trial):\n    return float('nan')", "returns NaN"),
        ("def objective(trial):\n    raise KeyError('x')", "it.py:2 raises KeyError: 'x'"),
        ("x = 1/0\n", "it.py:1 raises ZeroDivisionError"),
        ("def objective(:", "it.py:1 is not Python"),
        ("def other(trial): ...", "defines neither objective(trial), which returns a number, nor job(trial)"),
        ("def objective(trial): ...\ndef job(trial): ...", "defines both"),
        ("def job(trial):\n    return 3", "returns a int, not a shoal.Job"),
    ],
)
def test_a_sweep_whose_trials_all_fail_ends_with_the_reason(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(JobError, match=r"all 5 trials of it\.py so far failed\. The last: ") as error:
        swept(write(tmp_path, text), 100)
    assert words in str(error.value)


def test_a_trial_that_was_given_up_while_it_ran_has_failed_whatever_it_returns(tmp_path: Path) -> None:
    text = "from shoal.tasks.sweep_study import give_up\n"
    text += "def objective(trial):\n    if not trial.number:\n"
    text += "        give_up(trial.study, trial.number, 'silent for long')\n    return 1\n"
    result = swept(write(tmp_path, text), 3)
    assert [trial.state for trial in result.trials] == ["fail", "complete", "complete"]
    assert result.trials[0].reason == "silent for long"


def test_a_grid_whose_trials_all_fail_is_an_error_too(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"all 2 trials of it\.py so far failed\. The last: it\.py:1 raises"):
        swept(write(tmp_path, 'def objective(trial): return trial.suggest_int("x", 0, 1) / 0'), 9, sampler="grid")


def test_another_direction_or_another_file_is_refused(tmp_path: Path) -> None:
    file, other = write(tmp_path, BOWL), write(tmp_path, BOWL, "other.py")
    swept(file, 1)
    with pytest.raises(ConfigError, match=r"is to minimize\. Go on without --maximize"):
        swept(file, 2, is_maximized=True)
    with pytest.raises(ConfigError, match=r"has the sweep of it\.py by its loss\. Give another --folder"):
        swept(other, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sampler": "tp"}, "--sampler 'tp' is none. Did you mean 'tpe'?"),
        ({"pruner": "mean"}, "--pruner 'mean' is none. Did you mean 'median'?"),
        ({"seed": -1}, "--seed -1: give a number from 0"),
        ({"trials": 0}, "--trials 0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    trials = settings.pop("trials", 3)
    with pytest.raises(ConfigError) as error:
        swept(write(tmp_path, BOWL), trials, **settings)
    assert words in str(error.value)


def test_without_optuna_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'shoal\[sweep\]'"):
        swept(write(tmp_path, BOWL), 3)


def test_a_line_that_was_cut_off_in_the_journal_is_removed(tmp_path: Path) -> None:
    file = write(tmp_path, BOWL)
    before = swept(file, 3, seed=0)
    with (tmp_path / "sweep" / JOURNAL).open("a") as journal:
        journal.write('{"op_code": 5, "work')
    after = swept(file, 5, seed=0)
    assert tried(after)[:3] == tried(before)
    assert after.done == 5


KILLED = """
import os, pathlib
def objective(trial):
    x = trial.suggest_float("x", 0, 1)
    if trial.number == 3 and not pathlib.Path("again").exists():
        pathlib.Path("reached").touch()
        pathlib.Path("hold").open().read()  # a pipe that nobody writes to
    return x
"""


def test_what_was_running_when_everything_was_killed_is_tried_again_with_the_same_parameters(tmp_path: Path) -> None:
    file = write(tmp_path, KILLED)
    os.mkfifo(tmp_path / "hold")
    command = [sys.executable, "-m", "shoal", "sweep", str(file), "--trials", "6", "--seed", "5", "--at-once", "1"]
    settings = {"cwd": tmp_path, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    killed = subprocess.Popen([*command, "--folder", "sweep"], **settings)  # type: ignore[call-overload]
    wait_until((tmp_path / "reached").exists, seconds=TIMEOUT_S)
    with pytest.raises(ConfigError, match="another process runs the sweep"):
        swept(file, 6, tmp_path / "sweep")
    killed.send_signal(signal.SIGKILL)
    killed.wait(TIMEOUT_S)
    (tmp_path / "again").touch()
    result = swept(file, 6, tmp_path / "sweep", seed=5)
    assert [trial.state for trial in result.trials] == ["complete"] * 3 + ["fail"] + ["complete"] * 3
    assert result.trials[3].reason == "it was running when the sweep was cut off"
    assert result.trials[4].parameters == result.trials[3].parameters

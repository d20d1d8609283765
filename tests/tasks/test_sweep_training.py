"""What a training run tells its sweep while it runs, read off an event log; and runs that are given up."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from shoal.core.errors import ConfigError, JobError
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.launch.slurm.code import copy_code
from shoal.spec.job import Job
from shoal.tasks import sweep_training
from shoal.tasks.sweep_study import FAILED, Search, open_study
from shoal.tasks.sweep_training import Reports, train_trial
from shoal.tasks.sweep_trial import Ended, Task, fixed_job, run_trial
from tests.tasks.sweep_files import write


def job(*, is_evaluated: bool = False, steps: int = 40) -> Job:
    data = [0.0] * 8
    return Job(
        model=lambda: None,
        loss=lambda out, batch: out,
        optimizer=lambda parameters: None,
        data=data,
        eval_data=data if is_evaluated else None,
        batch_size=4,
        steps=steps,
    )


def asked(study: optuna.Study) -> optuna.Trial:
    """Return a trial with a parameter."""
    trial = study.ask()
    trial.suggest_float("rate", 0, 1)
    return trial


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path, "run", stem="run")


def test_without_evaluations_the_mean_of_each_twentieth_of_the_losses_is_reported(run: RunFolder) -> None:
    log, reports = EventLog(run.events_of(0)), Reports(run, job(), "loss")
    for step in range(1, 6):
        log.write("step", step=step, loss=float(step))
    assert list(reports.poll()) == [(2, 1.5), (4, 3.5)]
    log.write("step", step=6, loss=None)
    ((step, value),) = reports.poll()
    assert step == 6
    assert math.isnan(value)
    log.close()


def test_with_evaluations_their_metric_is_reported_and_losses_are_not(run: RunFolder) -> None:
    log, reports = EventLog(run.events_of(0)), Reports(run, job(is_evaluated=True), "accuracy")
    log.write("step", step=9, loss=1.0)
    log.write("eval", step=10, metrics={"loss": 0.5, "accuracy": 0.9})
    assert list(reports.poll()) == [(10, 0.9)]
    assert reports.last == 0.9
    log.write("eval", step=20, metrics={"loss": 0.5, "precision": 0.9})
    with pytest.raises(ConfigError, match="--metric accuracy: there is none"):
        list(reports.poll())
    log.close()


def test_a_job_that_takes_nothing_from_its_trial_is_refused(tmp_path: Path) -> None:
    task = Task(folder=tmp_path, file=tmp_path / "it.py", search=Search(), index=0)
    with pytest.raises(JobError, match="takes no parameter from its trial"):
        train_trial(open_study(tmp_path, Search()).ask(), job(), task)


def test_a_metric_of_a_job_without_evaluations_is_refused(tmp_path: Path) -> None:
    trial = asked(open_study(tmp_path, Search()))
    task = Task(folder=tmp_path, file=tmp_path / "it.py", search=Search(), index=0, metric="accuracy")
    with pytest.raises(ConfigError, match="the job has no eval_data"):
        train_trial(trial, job(), task)


ENDLESS = """
import sys, time
from pathlib import Path
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
run = RunFolder.create(Path(sys.argv[5]), sys.argv[7], stem="run")
EventLog(run.events_of(0)).write("eval", step=5, metrics={"loss": 9.0})
time.sleep(600)
"""


def test_a_run_that_is_worse_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run is a stand-in that evaluates once and then goes on for ever: its process must have ended."""
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def note(*args: Any, **kwargs: Any) -> "subprocess.Popen[bytes]":
        started.append(popen(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(sweep_training, "_START", ENDLESS)
    monkeypatch.setattr("subprocess.Popen", note)
    study = open_study(tmp_path, Search())
    for _ in range(5):
        good = study.ask()
        good.report(1.0, 5)
        study.tell(good, 1.0)
    task = Task(folder=tmp_path, file=tmp_path / "it.py", search=Search(), index=0)
    with pytest.raises(optuna.TrialPruned):
        train_trial(asked(study), job(is_evaluated=True), task)
    assert [process.poll() is not None for process in started] == [True]


def test_the_file_of_a_trial_makes_the_same_job_again(tmp_path: Path) -> None:
    text = "import shoal\nfrom tests.tasks.test_sweep_training import job as plain\n"
    text += 'def job(trial):\n    return plain(steps=trial.suggest_int("the steps", 1, 99))\n'
    file = write(tmp_path, text, 'it\'s "it".py')
    study = open_study(tmp_path, Search(seed=1))
    trial = study.ask()
    wanted = trial.suggest_int("the steps", 1, 99)
    task = Task(folder=tmp_path, file=file, search=Search(), index=0)
    again: dict[str, Any] = {}
    exec(sweep_training._source(trial, task), again)
    assert again["job"].total_steps == wanted
    with pytest.raises(JobError, match=r"returns a int, not a shoal\.Job"):
        fixed_job(str(write(tmp_path, "def job(trial):\n    return 3\n", "three.py")), {})


def test_a_run_that_is_killed_fails_with_what_it_said_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_training, "_START", "print('out of luck\\n'); raise SystemExit(9)")
    study = open_study(tmp_path, Search())
    task = Task(folder=tmp_path, file=tmp_path / "it.py", search=Search(), index=0)
    with pytest.raises(Exception, match="exit code 9: out of luck"):
        train_trial(asked(study), job(), task)


NAN = """
import sys
from pathlib import Path
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
run = RunFolder.create(Path(sys.argv[5]), sys.argv[7], stem="run")
EventLog(run.events_of(0)).write("eval", step=5, metrics={"loss": None})
"""


def test_a_run_that_ends_with_nan_fails_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_training, "_START", NAN)
    text = "from tests.tasks.test_sweep_training import job as plain\n"
    text += 'def job(trial):\n    return plain(steps=trial.suggest_int("steps", 1, 99), is_evaluated=True)\n'
    task = Task(folder=tmp_path, file=write(tmp_path, text), search=Search(), index=0)
    assert run_trial(task) == Ended(0, "fail")
    (trial,) = open_study(tmp_path, Search()).trials
    assert trial.state == optuna.trial.TrialState.FAIL
    assert trial.user_attrs[FAILED] == "the training run of job(trial) in it.py ends with a loss that is NaN."


BESIDE = """
import beside
from shoal.spec.job import Job
def job(trial):
    rate, data = trial.suggest_float("rate", 0, 1), [0.0] * 8
    plain = {"model": lambda: None, "loss": lambda out, batch: out, "optimizer": lambda parameters: None}
    return Job(**plain, data=data, batch_size=4, steps=beside.steps)
"""


def test_a_trial_that_a_job_trains_has_the_code_that_the_job_was_submitted_with(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("steps = 7\n")
    file = write(tmp_path, BESIDE)
    copy_code(tmp_path / "sweep" / "code", file=file)
    for path in (file, tmp_path / "beside.py"):
        path.write_text("raise RuntimeError('edited')\n")
    use_and_write = (
        "import sys; from pathlib import Path; from types import SimpleNamespace\n"
        "from shoal.tasks.call import use_copy; from shoal.tasks.sweep_training import _source\n"
        "use_copy(Path(sys.argv[2]))\n"  # as a worker of the job does
        "print(_source(SimpleNamespace(number=0, params={'rate': 0.5}), SimpleNamespace(file=Path(sys.argv[1]))))"
    )
    written = _python(tmp_path, use_and_write, str(file), str(tmp_path / "sweep" / "code"))
    assert _python(tmp_path, f"{written}\nprint(job.steps)") == "7\n"  # in another process, as `shoal train` is


def _python(folder: Path, code: str, *arguments: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=True).stdout

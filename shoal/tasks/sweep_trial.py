"""One trial of a sweep, run as a task in any process that sees the sweep's folder.

1. Ask the study in the folder's journal for a trial; note which task it is.
2. Load the user's file. `objective(trial)` is called, and what it returns is the value. Of `job(trial)` a whole
   training run is made (sweep_training.py).
3. Tell the study: the value, or that it was pruned, or that it failed, and why.
"""

import math
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shoal.core.errors import JobError, ShoalError
from shoal.spec.job import Job
from shoal.tasks.call import load_file, use_copy
from shoal.tasks.sweep_study import EXHAUSTED, FAILED, TASK, Search, is_exhausted, is_vain, make_up, open_study

if TYPE_CHECKING:
    import optuna

OBJECTIVE, JOB = "objective", "job"


@dataclass(frozen=True, kw_only=True)
class Task:
    """What a process needs to know to run one more trial."""

    folder: Path
    file: Path
    search: Search
    index: int
    """Counts the tasks of a sweep; no two have the same."""
    first: int = 0
    """The first of those that were begun with it."""
    metric: str = "loss"
    """Of the evaluation of a training run."""
    train_flags: tuple[str, ...] = ()
    """For `shoal train`, such as --workers 2."""


@dataclass(frozen=True)
class Ended:
    """How a trial ended."""

    number: int
    state: str
    """complete, pruned or fail; none: it was not begun, as there is nothing left to try, or all fail."""


def run_trial(task: Task) -> Ended:
    """Run one more trial of the sweep, and return how it ended. What the user's file raises makes it fail."""
    from optuna.trial import TrialState

    study = open_study(task.folder, task.search, index=task.index)
    make_up(study, task=task.index, reason="the process that ran it died")  # an executor may try a task again
    if is_exhausted(study) or is_vain(study, first=task.first):
        return Ended(-1, "none")
    trial = study.ask()
    trial.set_user_attr(TASK, task.index)
    state, value = TrialState.FAIL, None
    try:
        value = _value(task, trial)
        state = TrialState.COMPLETE
    except _pruned():
        state = TrialState.PRUNED
    except Exception as error:
        trial.set_user_attr(FAILED, _reason(task.file, error))
    return _tell(study, Ended(trial.number, state.name.lower()), value)


def load(file: Path) -> tuple[str, Callable[["optuna.trial.BaseTrial"], Any]]:
    """Return which of the two the file defines, "objective" or "job", and the function."""
    module = _module(file)
    found = {name: value for name in (OBJECTIVE, JOB) if callable(value := vars(module).get(name))}
    if len(found) == 2:
        raise JobError(f"{file.name} defines both objective(trial) and job(trial). Keep one.")
    if not found:
        is_job = isinstance(vars(module).get(JOB), Job)
        hint = " Its job is fixed: make it a function, def job(trial), that returns one." if is_job else ""
        raise JobError(f"{file.name} defines neither objective(trial), which returns a number, nor job(trial).{hint}")
    return next(iter(found.items()))


def fixed_job(file: str, parameters: dict[str, Any], *, code: str = "") -> Job:
    """Return the job that `file` makes with these parameters: what the file of a trial consists of.

    `code` is the copy of the file and its modules that the trial's job was submitted with.
    """
    from optuna.trial import FixedTrial

    if code:
        use_copy(Path(code))
    _, function = load(Path(file))
    return as_job(Path(file), function(FixedTrial(parameters)))


def as_job(file: Path, job: object) -> Job:
    """Return `job`, which must be one."""
    if not isinstance(job, Job):
        raise JobError(f"job(trial) in {file.name} returns a {type(job).__name__}, not a shoal.Job.")
    return job


def _module(file: Path) -> ModuleType:
    try:
        return load_file(str(file))
    except ShoalError:
        raise
    except SyntaxError as error:
        raise JobError(f"{file.name}:{error.lineno} is not Python: {error.msg}.") from None
    except Exception as error:
        raise JobError(_reason(file, error)) from error


def _value(task: Task, trial: "optuna.Trial") -> float:
    kind, function = load(task.file)
    if kind == JOB:
        from shoal.tasks.sweep_training import train_trial

        number = train_trial(trial, as_job(task.file, function(trial)), task)
        if math.isnan(number):
            raise JobError(f"the training run of job(trial) in {task.file.name} ends with a {task.metric} that is NaN.")
        return number
    return _as_number(task.file, function(trial))


def _as_number(file: Path, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise JobError(f"objective(trial) in {file.name} returns {value!r}, not a number.") from None
    if math.isnan(number):
        raise JobError(f"objective(trial) in {file.name} returns NaN.")
    return number


def _tell(study: "optuna.Study", ended: Ended, value: float | None) -> Ended:
    """Tell the study how a trial ended, and return that."""
    import optuna

    try:
        state = optuna.trial.TrialState[ended.state.upper()]
        told = study.tell(ended.number, value, state=state, skip_if_finished=True)
        # Not as it ended, where somebody who started the sweep again has given it up meanwhile: before, or just now.
        return Ended(ended.number, told.state.name.lower())
    except optuna.exceptions.UpdateFinishedTrialError:
        return Ended(ended.number, "fail")
    except RuntimeError:
        if not isinstance(study.sampler, optuna.samplers.BruteForceSampler):
            raise
        # With the last point of a grid its sampler ends Optuna's own loop, which we do not have. The trial is told.
        study.set_user_attr(EXHAUSTED, True)
    return ended


def _pruned() -> type[Exception]:
    import optuna

    return optuna.TrialPruned


def _reason(file: Path, error: Exception) -> str:
    """Return "sweep.py:12 raises ValueError: ..." for the last line of the user's file that led to `error`."""
    if isinstance(error, ShoalError):
        return str(error)
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    place = f"{file.name}:{lines[-1]}" if lines else file.name
    return f"{place} raises {type(error).__name__}: {error}"

"""A trial that is a whole training run: `shoal train` in a process of its own, with a run folder of its own.

1. A file of two lines, trials/trial-7.py, has the trial's parameters: it can be trained again by hand.
2. `shoal train trial-7.py` runs, with the flags that the sweep was given; what it prints goes to trials/trial-7.txt.
3. Its events are read while it runs. Each evaluation is reported to the pruner; without evaluations, the mean loss of
   each twentieth of the steps. A run that is pruned is stopped in order, and if need be killed.
4. The value is that of the last report.

Example: 1000 steps without evaluations: reports after steps 50, 100, ..., each the mean of 50 losses.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from shoal.core.errors import ConfigError, JobError, WorkerFailed, did_you_mean
from shoal.core.events import EventReader
from shoal.core.files import write_whole
from shoal.core.run_folder import RunFolder
from shoal.spec.job import Job
from shoal.tasks.call import used_copy
from shoal.tasks.sweep_trial import Task

if TYPE_CHECKING:
    import optuna

TRIALS = "trials"
_REPORTS = 20
_POLL_S = 0.2
_STOP_S = 30.0
# The process dies with the one that started it, so that a sweep that is killed leaves nothing behind.
_START = (
    "import sys; from shoal.launch.parent import die_with_parent; die_with_parent(int(sys.argv.pop(1)));"
    "from shoal.cli.main import main; sys.exit(main(sys.argv[1:]))"
)


def train_trial(trial: "optuna.Trial", job: Job, task: Task) -> float:
    """Train the job of `trial` as a run of its own, and return its value; TrialPruned where that is given up."""
    import optuna

    if not trial.params:
        raise JobError(
            f"job(trial) in {task.file.name} takes no parameter from its trial. Call trial.suggest_float and the like "
            "in job itself, not in a function that is called later."
        )
    if job.eval_data is None and task.metric != "loss":
        raise ConfigError(f"--metric {task.metric}, but the job has no eval_data: only its loss is known.")
    folder = task.folder.resolve() / TRIALS
    folder.mkdir(exist_ok=True)
    run = RunFolder(folder / f"trial-{trial.number}")
    reports = Reports(run, job, task.metric)
    with _training(trial, run, task) as process:
        while process.poll() is None:
            time.sleep(_POLL_S)
            if _is_pruned(trial, reports):
                raise optuna.TrialPruned
    if process.returncode != 0:
        raise WorkerFailed(f"its run ended with exit code {process.returncode}: {_last_line(run)}")
    _is_pruned(trial, reports)
    if reports.last is None:
        raise JobError(f"the run in {run.path} has no {task.metric}.")
    return reports.last


class Reports:
    """The values of a growing run, by its steps."""

    def __init__(self, run: RunFolder, job: Job, metric: str) -> None:
        self.last: float | None = None
        self._reader = EventReader(run.events_of(0))
        self._metric = metric if job.eval_data is not None else None
        self._every = max(1, job.total_steps // _REPORTS)
        self._losses: list[float] = []

    def poll(self) -> Iterator[tuple[int, float]]:
        """Yield (step, value) for what is new."""
        for event in self._reader.poll():
            value = self._evaluated(event) if self._metric else self._mean_loss(event)
            if value is not None:
                self.last = value
                yield event["step"], value

    def _evaluated(self, event: dict[str, Any]) -> float | None:
        if event["kind"] != "eval":
            return None
        metrics = event["metrics"]
        if self._metric not in metrics:
            raise ConfigError(f"--metric {self._metric}: there is none.{did_you_mean(str(self._metric), [*metrics])}")
        value = metrics[self._metric]
        return math.nan if value is None else float(value)

    def _mean_loss(self, event: dict[str, Any]) -> float | None:
        if event["kind"] != "step":
            return None
        self._losses.append(math.nan if event["loss"] is None else float(event["loss"]))
        if event["step"] % self._every:
            return None
        mean, self._losses = fmean(self._losses), []
        return mean


def _is_pruned(trial: "optuna.Trial", reports: Reports) -> bool:
    """Report what is new; return whether the pruner gives the trial up."""
    news = list(reports.poll())
    for step, value in news:
        trial.report(value, step)
    return bool(news) and trial.should_prune()


@contextlib.contextmanager
def _training(trial: "optuna.Trial", run: RunFolder, task: Task) -> Iterator[subprocess.Popen[bytes]]:
    """Have `shoal train` running; at the end of the block it has ended."""
    file = run.path.with_suffix(".py")
    write_whole(file, _source(trial, task))
    asked = ["train", str(file), "--runs", str(run.path.parent), "--name", run.name, *task.train_flags]
    with run.path.with_suffix(".txt").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _START, str(os.getpid()), *asked],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the sweep alone, which then ends its trials
        )
    try:
        yield process
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)  # it stops in order
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)


def _source(trial: "optuna.Trial", task: Task) -> str:
    copy = used_copy()
    code = f", code={str(copy)!a}" if copy is not None else ""
    return (
        f'"""Trial {trial.number} of a sweep of {task.file.name!a}. To train it again: shoal train FILE"""\n\n'
        "from shoal.tasks.sweep_trial import fixed_job\n\n"
        f"job = fixed_job({str(task.file.resolve())!a}, {trial.params!a}{code})\n"
    )


def _last_line(run: RunFolder) -> str:
    """Return the last line that the run has printed."""
    lines = Path(run.path.with_suffix(".txt")).read_text(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "it has printed nothing")

"""A hyperparameter search: Optuna chooses what to try, and each trial is a task on an executor.

1. One process has the sweep's folder for itself (a lock). It mends the journal, marks the trials failed that were
   running when everything died, and puts the same parameters in line again.
2. While fewer than `trials` are done, as many tasks as may run at once are under way. A task asks the journal for a
   trial, runs it and tells the journal (sweep_trial.py); nothing else passes between the two sides.
3. A trial that raises has failed, and is not tried again until the sweep is started again. If the first few all fail,
   the sweep ends with the reason of the last. A task whose process died fails likewise, and the others go on.
4. At the end, and when it is interrupted, sweep.json says how it stands. Started again, it goes on until as many are
   done.

Example: 200 trials, 4 at once. After 120 were done, the node died with 4 running. Started again: 4 are marked failed,
the same 4 are run first, then 76 more.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.core.errors import ConfigError
from shoal.data.stage.locks import FileLock
from shoal.tasks.sweep_result import SweepResult, read_result, refuse_vain
from shoal.tasks.sweep_study import TASK, VAIN, Search, give_up, is_exhausted, make_up, mend, open_study
from shoal.tasks.sweep_trial import Ended, Task, run_trial

if TYPE_CHECKING:
    import optuna

_LOOK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to search, and how."""

    file: Path
    folder: Path
    trials: int
    at_once: int = 1
    search: Search = field(default_factory=Search)
    metric: str = "loss"
    train_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for flag, count in (("--trials", self.trials), ("--at-once", self.at_once)):
            if count < 1:
                raise ConfigError(f"{flag} {count}: give a number of at least 1.")


def run_sweep(
    sweep: Sweep, executor: Callable[[], Executor], *, watch: Callable[[SweepResult], None] = lambda _: None
) -> SweepResult:
    """Run trials until as many are done as were asked for, and return what came of the sweep.

    `executor` makes the executor that they run on, and makes it again if its processes have died. `watch` is called
    whenever trials have ended.
    """
    with alone(sweep.folder):
        mend(sweep.folder)
        study = open_sweep(sweep)
        make_up(study, reason="it was running when the sweep was cut off")
        try:
            _Running(sweep, study, watch).go(executor)
            refuse_vain(result_of(study, sweep))
        finally:
            result_of(study, sweep).write()
        return result_of(study, sweep)


def open_sweep(sweep: Sweep) -> "optuna.Study":
    """Return the study of a sweep, which notes whose it is, or must be of the same file."""
    study = open_study(sweep.folder, sweep.search)
    ours = {"file": sweep.file.name, "metric": sweep.metric}
    noted = study.user_attrs.get("shoal: of")
    if noted is None:
        study.set_user_attr("shoal: of", ours)
    elif noted != ours:
        raise ConfigError(
            f"{sweep.folder} has the sweep of {noted.get('file')} by its {noted.get('metric')}. Give another --folder."
        )
    return study


def result_of(study: "optuna.Study", sweep: Sweep) -> SweepResult:
    """Return the sweep as it stands."""
    return read_result(
        study,
        file=sweep.file,
        folder=sweep.folder,
        is_maximized=sweep.search.is_maximized,
        wanted=sweep.trials,
    )


def task_of(sweep: Sweep, index: int, *, first: int) -> Task:
    """Return the task number `index`, of those that were begun with `first`."""
    return Task(
        folder=sweep.folder.resolve(),
        file=sweep.file.resolve(),
        search=sweep.search,
        index=index,
        first=first,
        metric=sweep.metric,
        train_flags=sweep.train_flags,
    )


class _Running:
    """A sweep under way."""

    def __init__(self, sweep: Sweep, study: "optuna.Study", watch: Callable[[SweepResult], None]) -> None:
        self._sweep, self._study, self._watch = sweep, study, watch
        self._index = self._first = len(study.get_trials(deepcopy=False))
        self._left = sweep.trials - result_of(study, sweep).done
        self._tasks: dict[Future[Ended], int] = {}
        self._failures = 0

    def go(self, executor: Callable[[], Executor]) -> None:
        """Run what is left, on one executor after the other if their processes die."""
        self._watch(result_of(self._study, self._sweep))
        while self._has_more():
            with _closed(executor()) as opened, contextlib.suppress(BrokenExecutor):
                self._go_on(opened)
            self._bury(list(self._tasks), "the process that ran it died")

    def _go_on(self, executor: Executor) -> None:
        while self._tasks or self._has_more():
            while len(self._tasks) < self._sweep.at_once and self._has_more():
                task = task_of(self._sweep, self._index, first=self._first)
                self._tasks[executor.submit(run_trial, task)] = self._index
                self._index += 1
                self._left -= 1
            ended, _ = wait(self._tasks, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
            for future in ended:
                self._take(future)
            if ended:
                self._watch(result_of(self._study, self._sweep))

    def _has_more(self) -> bool:
        return self._left > 0 and not is_exhausted(self._study)

    def _take(self, future: "Future[Ended]") -> None:
        """Take what has come of a task. BrokenExecutor where its process, or one beside it, died."""
        error = future.exception()
        if isinstance(error, BrokenExecutor):
            raise error
        if error is not None:
            self._bury([future], f"{type(error).__name__}: {error}")
            return
        del self._tasks[future]
        if future.result().state == "fail":
            self._count_failure()

    def _bury(self, futures: "list[Future[Ended]]", reason: str) -> None:
        """Mark the trials failed of tasks that have not come to their end."""
        numbers = {trial.user_attrs.get(TASK): trial.number for trial in self._study.get_trials(deepcopy=False)}
        for future in futures:
            number = numbers.get(self._tasks.pop(future))
            if number is not None:
                give_up(self._study, number, reason)
            self._count_failure()

    def _count_failure(self) -> None:
        self._failures += 1
        if self._failures >= VAIN:
            refuse_vain(result_of(self._study, self._sweep))


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Have the sweep's folder for oneself."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / "sweep.lock")
        is_ours = lock.take()
    except OSError as error:
        raise ConfigError(f"{folder} cannot be the folder of a sweep: {error.strerror}.") from None
    if not is_ours:
        raise ConfigError(f"another process runs the sweep in {folder}. Wait for it, or give another --folder.")
    with lock:
        yield


@contextlib.contextmanager
def _closed(executor: Executor) -> Iterator[Executor]:
    """Have an executor; when the block is left by an error, its tasks are ended, where it knows how."""
    try:
        yield executor
    except BaseException:
        kill = getattr(executor, "kill", None)
        executor.shutdown(wait=False, cancel_futures=True) if kill is None else kill()
        raise
    executor.shutdown()

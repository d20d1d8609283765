"""`shoal.map`: a function for each of many items, on this machine, on a cluster, or by an executor of yours."""

import concurrent.futures
import contextlib
import functools
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import ConfigError
from shoal.tasks.alone import alone, refuse_live_jobs
from shoal.tasks.call import refer, refuse_inside_worker
from shoal.tasks.executor import Executor, Started, check_retries
from shoal.tasks.folder import TaskFolder
from shoal.tasks.journal import Journals, done_tasks
from shoal.tasks.kept import KeptTask, note_deaths
from shoal.tasks.outcome import Failure
from shoal.tasks.progress import Progress
from shoal.tasks.reads import check
from shoal.tasks.slurm import map_on_slurm
from shoal.tasks.submitting import SlurmOptions, check_options

T = TypeVar("T")
_LOOK_S = 0.1


def map(  # noqa: A001  # it is what it is
    function: Callable[[Any], T],
    items: Iterable[Any],
    *,
    folder: str | Path | None = None,
    workers: int | None = None,
    retries: int = 0,
    on_error: str = "raise",
    executor: concurrent.futures.Executor | None = None,
    slurm: "SlurmOptions | bool" = False,
    reads_at_once: int | str | None = None,
    progress: bool | None = None,
) -> list[T]:
    """Return `[function(item) for item in items]`, by worker processes on this machine.

    `workers` is how many tasks run at once: without it, one a core. `executor` is another `concurrent.futures.Executor`
    that runs them. `reads_at_once` is how many may be inside `with shoal.tasks.reads.reading():` ("auto": measured).
    With `folder`, each result is kept there as soon as it exists, and the same call goes on where an earlier one was
    cut off. With `slurm`, tasks run in a few jobs of a cluster. What a task raises is raised here with the worker's
    traceback, after `retries` more tries; `on_error="return"` puts it into the list instead. `progress` is shown on
    stderr where that is a terminal, unless told.
    """
    refuse_inside_worker()
    if on_error not in ("raise", "return"):
        raise ConfigError(f'on_error={on_error!r}: give "raise" or "return".')
    check(reads_at_once)
    check_retries(retries)
    listed = list(items)
    console = _console(sys.stderr.isatty() if progress is None else progress)
    with Progress(len(listed), console) as shown:
        if executor is not None:
            _refuse(executor=folder is not None or bool(slurm), reads=reads_at_once is not None)
            return _by_executor(executor, function, listed, retries=retries, on_error=on_error, progress=shown)
        if folder is None:
            _refuse(slurm=bool(slurm), reads=reads_at_once is not None)
            return _here(function, listed, workers=workers, retries=retries, on_error=on_error, progress=shown)
        options = slurm if isinstance(slurm, SlurmOptions) else SlurmOptions()
        check_options(options, len(listed))
        kept = TaskFolder.begin(Path(folder), refer(function), listed)
        if slurm:
            map_on_slurm(
                kept,
                options,
                function=function,
                workers=workers,
                retries=retries,
                reads_at_once=reads_at_once,
                progress=shown,
            )
        else:
            run_kept(kept, workers=workers, retries=retries, reads_at_once=reads_at_once, progress=shown)
        return collect(kept, on_error=on_error)


def _refuse(*, executor: bool = False, slurm: bool = False, reads: bool = False) -> None:
    if executor:
        raise ConfigError("executor= runs the tasks itself: leave out folder= and slurm=.")
    if slurm:
        raise ConfigError("slurm= needs folder=: a folder that all nodes see, where tasks and results are kept.")
    if reads:
        raise ConfigError("reads_at_once= needs folder=, where the tasks agree on who reads.")


def _here(
    function: Callable[[Any], T],
    items: Sequence[Any],
    *,
    workers: int | None,
    retries: int,
    on_error: str,
    progress: Progress,
) -> list[T]:
    """Run all in this machine's processes; nothing is kept, so the first failure ends it."""
    pool = Executor(_few(workers, len(items)), retries=retries, say=progress.say)
    try:
        started = pool.start(function, items)
        _watch(started, progress, stop_at_failure=on_error == "raise")
    except BaseException:
        pool.kill()
        raise
    if started.failures and on_error == "raise":
        pool.kill()
    else:
        pool.shutdown()
    return _settled(started.values, started.failures, on_error, kept="")


def run_kept(
    folder: TaskFolder,
    *,
    workers: int | None,
    retries: int,
    reads_at_once: int | str | None,
    progress: Progress,
) -> None:
    """Run the tasks of a folder that have no result yet, by this machine's processes."""
    with alone(folder):
        refuse_live_jobs(folder)
        before = done_tasks(folder.done)
        undone = [index for index in range(folder.count()) if index not in before]
        if undone:
            _run_undone(
                folder, undone, workers=workers, retries=retries, reads_at_once=reads_at_once, progress=progress
            )


def _run_undone(
    folder: TaskFolder,
    undone: Sequence[int],
    *,
    workers: int | None,
    retries: int,
    reads_at_once: int | str | None,
    progress: Progress,
) -> None:
    before = folder.count() - len(undone)
    pool = Executor(_few(workers, len(undone)), retries=retries, say=progress.say)
    builder = functools.partial(KeptTask, str(folder.path), "", reads_at_once)
    try:
        started = pool.start(builder, undone, is_builder=True, done_items=lambda: done_tasks(folder.done))
        _watch(started, progress, before=before)
    except BaseException:
        pool.kill()
        raise
    pool.shutdown()
    note_deaths(folder, {undone[at]: failure for at, failure in started.failures.items()})


def collect(folder: TaskFolder, *, on_error: str) -> list[Any]:
    """Return the results that a folder holds, each once; failures are raised, or returned in their places."""
    count = folder.count()
    values: list[Any] = [None] * count
    done, failures = set(), {}
    for record in Journals(folder.done).news():
        if record.has_failed:
            failures[record.index] = pickle.loads(record.data)  # noqa: S301  # from our own folder
        elif record.index not in done:
            done.add(record.index)
            values[record.index] = pickle.loads(record.data)  # noqa: S301  # the same
    left = {index: failures.get(index, Failure("it was not run.")) for index in range(count) if index not in done}
    return _settled(values, left, on_error, kept=str(folder.path))


def _settled(values: list[Any], failures: Mapping[int, Failure], on_error: str, *, kept: str) -> list[Any]:
    if not failures:
        return values
    if on_error == "return":
        for index, failure in failures.items():
            values[index] = failure.as_exception()
        return values
    first = min(failures)
    error = failures[first].as_exception()
    said = f"This was task {first} of {len(values):,}."
    if kept:
        said += (
            f" {len(failures):,} failed; the results of the others are in {kept}: the same call tries only those again."
        )
    error.add_note(said)
    raise error


def _watch(started: Started, progress: Progress, *, before: int = 0, stop_at_failure: bool = False) -> None:
    seen = 0
    while not started.batch.ended.is_set() and seen < len(started.values):
        seen = started.wait(seen, seconds=_LOOK_S)
        progress.update(before + seen, failed=len(started.failures))
        if stop_at_failure and started.failures:
            return


def _by_executor(
    executor: concurrent.futures.Executor,
    function: Callable[[Any], T],
    items: Sequence[Any],
    *,
    retries: int,
    on_error: str,
    progress: Progress,
) -> list[T]:
    """Run all by an executor of the user's."""
    with getattr(executor, "batch", contextlib.nullcontext)():  # submitit: one array instead of a job each
        futures = [executor.submit(function, item) for item in items]
    waiting = dict(zip(futures, range(len(items)), strict=True))
    values: list[Any] = [None] * len(items)
    tries: dict[int, int] = {}
    count = 0
    while waiting:
        # In one go, not as_completed: futures of submitit and Ray are not of concurrent.futures.
        ended = [future for future in waiting if future.done()]
        if not ended:
            _await_some(waiting)
        for future in ended:
            index = waiting.pop(future)
            try:
                values[index] = future.result()
            except Exception as error:
                tries[index] = tries.get(index, 0) + 1
                if tries[index] <= retries:
                    waiting[executor.submit(_again, function, tries[index], items[index])] = index
                    continue
                if on_error == "raise":
                    for other in waiting:
                        other.cancel()
                    raise
                values[index] = error
            count += 1
        progress.update(count)
    return values


def _again(function: Callable[[Any], Any], _number: int, item: Any) -> Any:
    """Call a function once more: Dask takes what it knows of a call for the result of an equal one."""
    return function(item)


def _await_some(waiting: Iterable[Any]) -> None:
    try:
        concurrent.futures.wait(waiting, timeout=_LOOK_S, return_when=concurrent.futures.FIRST_COMPLETED)
    except AttributeError:  # not futures of concurrent.futures
        import time

        time.sleep(_LOOK_S)


def _few(workers: int | None, tasks: int) -> int | None:
    from shoal.core.host import usable_cores

    return workers if workers is not None else max(1, min(usable_cores(), tasks))


def _console(is_shown: bool) -> Any:
    if not is_shown:
        return None
    from rich.console import Console

    return Console(stderr=True)

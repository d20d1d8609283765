"""A `concurrent.futures.Executor` on a cluster: what is submitted gathers for a moment, then goes as a map of its own.

1. `submit` puts a call in line. When nothing was added for `GATHER_S`, all that is in line becomes maps, one for each
   function, in folders 1, 2, ... of the executor's: few jobs, as `shoal.map` has them (slurm.py).
2. A future is settled as soon as its task's record is in a journal, long before the other tasks of its map are done.
3. At most `MOST_MAPS` are under way: what is submitted meanwhile gathers until one of them has ended.
4. What a task of a function takes is known after its first map: the next ones are planned without measuring.

If this process is killed, the jobs run the tasks that they have; the results stay in the folder.
"""

import concurrent.futures
import dataclasses
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import WorkerFailed
from shoal.tasks.call import Reference, load, refer, refuse_inside_worker
from shoal.tasks.executor import check_retries
from shoal.tasks.folder import TaskFolder
from shoal.tasks.journal import Record
from shoal.tasks.progress import Progress
from shoal.tasks.slurm import map_on_slurm
from shoal.tasks.submitting import SlurmOptions

T = TypeVar("T")
GATHER_S = 0.2
LONGEST_GATHER_S = 2.0
MOST_MAPS = 8
_LOOK_S = 0.5


@dataclass(frozen=True)
class _Call:
    """A call in line."""

    function: Callable[..., Any]
    reference: Reference
    arguments: bytes
    future: "concurrent.futures.Future[Any]"


class SlurmExecutor(concurrent.futures.Executor):
    """Jobs of a Slurm cluster, with `submit`, `map`, `as_completed` and the rest as in `concurrent.futures`.

    `folder` is one that all nodes see. `workers` is how many tasks of a map may run at once, at most; what a task needs
    stands in `options`. A task that raises is tried `retries` times more.
    """

    def __init__(
        self, folder: str | Path, options: SlurmOptions | None = None, *, workers: int | None = None, retries: int = 0
    ) -> None:
        refuse_inside_worker()
        check_retries(retries)
        self._folder = Path(folder)
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._options = options or SlurmOptions()
        self._workers, self._retries = workers, retries
        self._news = threading.Condition()
        self._line: list[_Call] = []
        self._added_s = 0.0
        self._maps: list[threading.Thread] = []
        self._is_shut, self._is_killed = False, False
        self._task_s: dict[Reference, float] = {}
        self._thread = threading.Thread(target=self._gather, name="shoal slurm tasks", daemon=True)
        self._thread.start()

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """Return the future of `fn(*args, **kwargs)`."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        call = _Call(fn, refer(fn), pickle.dumps((args, kwargs), pickle.HIGHEST_PROTOCOL), future)
        with self._news:
            if self._is_shut:
                raise RuntimeError("cannot schedule new futures after shutdown")
            self._line.append(call)
            self._added_s = time.monotonic()
            self._news.notify_all()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let nothing more be submitted; wait for what was. What has not gone to a job yet can be cancelled."""
        with self._news:
            self._is_shut = True
            for call in self._line if cancel_futures else ():
                call.future.cancel()
            self._news.notify_all()
        if wait:
            self._thread.join()  # as long as tasks take: whoever wants less, cancels or kills
            for each in self._maps:
                each.join()

    def kill(self) -> None:
        """End all jobs; futures that have no result fail."""
        self._is_killed = True
        self.shutdown(cancel_futures=True)

    def _gather(self) -> None:
        """Make maps of what is in line, until nothing more can come."""
        while True:
            with self._news:
                self._news.wait_for(lambda: self._line or self._is_shut, _LOOK_S)
                if not self._line and self._is_shut:
                    return
                begun_s = time.monotonic()
                while self._line and not self._is_gathered(begun_s):
                    self._news.wait(GATHER_S / 4)
                line, self._line = self._line, []
            wanted = [call for call in line if call.future.set_running_or_notify_cancel()]
            try:
                for reference in dict.fromkeys(call.reference for call in wanted):
                    self._start([call for call in wanted if call.reference == reference])
            except Exception as error:  # no more threads
                _fail(wanted, error)

    def _is_gathered(self, begun_s: float) -> bool:
        self._maps = [each for each in self._maps if each.is_alive()]
        if len(self._maps) >= MOST_MAPS:
            return False
        now_s = time.monotonic()
        return self._is_shut or now_s - self._added_s > GATHER_S or now_s - begun_s > LONGEST_GATHER_S

    def _start(self, calls: list[_Call]) -> None:
        thread = threading.Thread(target=self._run, args=(calls,), name="shoal slurm map", daemon=True)
        thread.start()
        self._maps.append(thread)

    def _run(self, calls: list[_Call]) -> None:
        """Run calls of one function as a map, and settle their futures."""
        seconds: list[float] = []

        def settle(record: Record) -> None:
            seconds.append(record.seconds)
            _settle(calls[record.index].future, record)

        error: BaseException | None = None
        try:
            folder = TaskFolder.begin(self._next_folder(), refer(run_call), [(c.reference, c.arguments) for c in calls])
            map_on_slurm(
                folder,
                self._planned(calls),
                function=calls[0].function,
                workers=self._workers,
                retries=self._retries,
                reads_at_once=None,
                progress=Progress(len(calls), None),
                settle=settle,
                is_stopped=lambda: self._is_killed,
            )
            self._task_s[calls[0].reference] = sum(seconds) / max(1, len(seconds))
        except BaseException as why:  # nobody else would tell those who wait
            error = why
        _fail(calls, error or WorkerFailed("its map ended without a result of it."))

    def _planned(self, calls: Sequence[_Call]) -> SlurmOptions:
        """Return the options, with what a task takes where that is known."""
        task_s = self._options.task_time_s or self._task_s.get(calls[0].reference)
        return dataclasses.replace(self._options, task_time_s=task_s)

    def _next_folder(self) -> Path:
        """Make a folder with the next free number, and return it."""
        taken = [int(path.name) for path in self._folder.iterdir() if path.name.isdigit()]
        for number in range(max(taken, default=0) + 1, 1_000_000):
            path = self._folder / str(number)
            try:
                path.mkdir(mode=0o700)
                return path
            except FileExistsError:  # another thread was faster
                continue
        raise WorkerFailed(f"{self._folder} has a million maps. Give another folder.")


def run_call(item: tuple[Reference, bytes]) -> Any:
    """Run one call, in a job. Its function comes first: with it comes what its arguments are made of."""
    reference, arguments = item
    function = load(reference)
    args, kwargs = pickle.loads(arguments)  # noqa: S301  # from our own folder
    return function(*args, **kwargs)


def _fail(calls: Sequence[_Call], error: BaseException) -> None:
    for call in calls:
        if not call.future.done():
            call.future.set_exception(error)


def _settle(future: "concurrent.futures.Future[Any]", record: Record) -> None:
    if future.done():
        return
    try:
        found = pickle.loads(record.data)  # noqa: S301  # from our own folder
    except Exception as error:
        future.set_exception(error)
        return
    if record.has_failed:
        future.set_exception(found.as_exception())
    else:
        future.set_result(found)

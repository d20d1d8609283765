"""The workers of hangs.py: they train a small job, and one of them comes to stand still.

    python -m benchmarks.hangs_worker

It reads cases from stdin, a line of JSON each, and forks all workers for each of them. They write lines of JSON to
stdout: {"worker": 1, "fault": TIME} just before the hang, {"worker": 0, "type": "PeerLost", "text": ..., "time": TIME}
at their end. What they say of the hang is in the events of the run.

Each hang is the line behind `# here: CAUSE`; hangs.py looks for its number.
"""

import ctypes
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.fault import watch
from shoal.spec.job import Job
from shoal.training.opening import open_run
from shoal.training.run import Run

WORKERS = 3
VICTIM = 1
TRAINED_S = 1.5
"""How long all train before one comes to stand still: their usual step is known then."""
_FOREVER_S = 600.0


class Fault:
    """When it is time for the hang, on the worker that has it."""

    def __init__(self, cause: str, index: int) -> None:
        self._cause, self._index = cause, index
        self._begin_s = time.monotonic()

    def is_due(self, *causes: str) -> bool:
        """Return whether this worker is to have one of `causes`, now; from then on, it has."""
        is_due = self._is_near(causes) and self._index == VICTIM
        if is_due:
            self.say()
        return is_due

    def _is_near(self, causes: tuple[str, ...]) -> bool:
        return self._cause in causes and time.monotonic() - self._begin_s > TRAINED_S

    def sum_if_asked(self) -> None:
        """Call a collective of the user's own, with one element more on one worker, where that is the cause."""
        if self._cause == "another shape":
            dist.all_reduce(torch.ones(4 if self._index == VICTIM else 3))

    def begin(self) -> None:
        """Count the time from now."""
        self._begin_s = time.monotonic()

    def say(self) -> None:
        """Say that it begins."""
        _say(worker=self._index, fault=time.time())


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Samples, until they do not come."""

    def __init__(self, fault: Fault, count: int) -> None:
        self._fault, self._count = fault, count
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self._fault.is_due("dataset sleeps"):
            time.sleep(_FOREVER_S)  # here: dataset sleeps
        if self._fault.is_due("dataset deadlocks"):
            self._lock.acquire()
            self._lock.acquire()  # here: dataset deadlocks
        x = torch.full((5,), float(index % 7))
        return x, x.sum()


class Model(nn.Module):
    """A model, until it does not return."""

    def __init__(self, fault: Fault, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1))
        self._fault = fault

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make of `x`."""
        self._fault.sum_if_asked()
        if self._fault.is_due("model sleeps", "model sleeps, DDP", "model sleeps, ZeRO-3"):
            time.sleep(_FOREVER_S)  # here: model sleeps
        if self._fault.is_due("extra collective"):
            dist.all_reduce(torch.ones(3))  # here: extra collective
        if self._fault.is_due("C holds Python's lock"):
            ctypes.PyDLL(None).sleep(int(_FOREVER_S))  # here: C holds Python's lock
        return self.layers(x)  # type: ignore[no-any-return]


class Optimizer(torch.optim.SGD):
    """An optimizer, until its step does not end."""

    fault: Fault

    def step(self, closure: Any = None) -> Any:
        """Do a step."""
        if self.fault.is_due("optimizer blocks"):
            threading.Event().wait(_FOREVER_S)  # here: optimizer blocks
        return super().step(closure)


def loop(run: Run, fault: Fault, *, folder: Path) -> None:
    """Train as people do in a loop of their own."""
    fault.begin()
    for batch in run.batches():
        if fault.is_due("returned early"):
            break
        if fault.is_due("process has ended"):
            os._exit(0)
        run.step(batch)
        if fault.is_due("hook waits for a file"):
            while not (folder / "go-on").exists():
                time.sleep(0.05)  # here: hook waits for a file
        if fault.is_due("hook reads a pipe"):
            os.mkfifo(folder / "pipe")
            (folder / "pipe").read_text()  # here: hook reads a pipe
        if fault.is_due("SIGSTOP"):
            os.kill(os.getpid(), signal.SIGSTOP)  # here: SIGSTOP


def job_of(cause: str, index: int, fault: Fault) -> Job:
    """Return the job that worker `index` has, which is another one where that is the cause."""
    is_other = index == VICTIM

    def optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = Optimizer(parameters, lr=0.001)
        made.fault = fault
        return made

    width = 9 if is_other and cause == "another model" else 8
    job = Job(
        model=lambda: Model(fault, width),
        loss=lambda output, batch: F.mse_loss(output[:, 0], batch[1]),
        optimizer=optimizer,
        data=Data(fault, 10_001 if is_other and cause == "another dataset" else 10_000),
        batch_size=24,
        steps=100_001 if is_other and cause == "another number of batches" else 100_000,
    )
    return dataclasses.replace(job, seed=7) if is_other and cause == "another seed" else job


def be_worker(index: int, *, cause: str, folder: str, host: str, port: int, hang_s: float | None) -> None:
    """Train until the end or an error, and say which; `hang_s` is for tests, who have less time."""
    if hang_s is not None:
        watch.HANG_S = watch.START_S = hang_s
    torch.set_num_threads(1)
    fault, run_folder = Fault(cause, index), RunFolder(Path(folder))
    rank = Rank(index, WORKERS, index, WORKERS, host, port, store_is_hosted=True)
    log = EventLog(run_folder.events_of(index))
    found: dict[str, str] = {"type": "", "text": "ended"}
    if cause.startswith("another ") and index == VICTIM:
        fault.say()
    try:
        store = connect(rank, timeout_s=60)
        with open_run(job_of(cause, index, fault), run_folder, rank=rank, store=store, log=log) as run:
            loop(run, fault, folder=run_folder.path)
    except Exception as error:
        found = {"type": type(error).__name__, "text": str(error)}
    _say(worker=index, time=time.time(), **found)


def serve() -> None:
    """Fork all workers for each case that is written to stdin; end with stdin."""
    for line in sys.stdin:
        case = json.loads(line)
        children = [_forked(partial(be_worker, index, **case)) for index in range(WORKERS)]
        _say(started=children)
        for child in children:
            os.waitpid(child, 0)
        _say(ended=True)


def _forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child == 0:
        try:
            work()
        finally:
            os._exit(0)  # what threads still wait for is nobody's concern now
    return child


def _say(**words: Any) -> None:
    os.write(1, (json.dumps(words) + "\n").encode())  # at once and whole, also from a fork


if __name__ == "__main__":
    serve()

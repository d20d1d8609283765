"""A Program as a run: its folder, its workers, and what its main is given."""

import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from shoal.comm.device import pick_device, set_threads
from shoal.comm.rank import Rank
from shoal.comm.rpc import Answer, name_of, serving, start_call
from shoal.core.errors import PlanError
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.run_lock import held
from shoal.core.toml import write_toml
from shoal.spec.plan import Mesh, Plan
from shoal.spec.program import Program
from shoal.spec.record import JobRecord
from shoal.training.host import this_host
from shoal.training.loggers.registry import config_of, loggers_of
from shoal.training.loggers.tensorboard import TensorBoard
from shoal.training.memory import PeakMemory
from shoal.training.metrics import Metrics
from shoal.training.prepare import Asked, run_record


class ProgramRun:
    """One worker's side of a run of a Program: what its `main` is given."""

    def __init__(self, program: Program, folder: RunFolder, *, rank: Rank, device: torch.device, log: EventLog) -> None:
        self.folder, self.device, self.workers = folder, device, rank.workers
        self.rank = rank.index
        """Which worker this is, from 0."""
        self.name = name_of(rank.index)
        """What torch.distributed.rpc calls it."""
        self.steps = program.steps
        """How many steps it is to do, if that was said: by the program, or by --steps."""
        self.step_count = 0
        """How many steps have been noted."""
        self._timeout_s = program.call_timeout_s
        is_logged = rank.index == 0 and "tensorboard" in loggers_of(folder)
        tensorboard = TensorBoard(folder) if is_logged else None
        self._metrics = Metrics(log, tensorboard=tensorboard, unit=program.unit)
        self._metrics.begin(0, config_of(folder))
        self._memory = PeakMemory(device, divided=False)
        self._last_s, self._waited_s = time.perf_counter(), 0.0

    @property
    def others(self) -> list[int]:
        """The numbers of the other workers."""
        return [worker for worker in range(self.workers) if worker != self.rank]

    def start(self, worker: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Answer:
        """Have `worker` call `function`, of the same file, and return its Answer: `wait()` brings what it returns."""
        return start_call(worker, function, args, kwargs, timeout_s=self._timeout_s, on_waited=self._note_wait)

    def call(self, worker: int, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Have `worker` call `function`, and return what it returns."""
        return self.start(worker, function, *args, **kwargs).wait()

    def _note_wait(self, seconds: float) -> None:
        self._waited_s += seconds

    def stepped(self, *, loss: float, samples: int = 0) -> None:
        """Note that a step is done: for the live view, the report and TensorBoard. The steps are worker 0's."""
        self.step_count += 1
        now_s = time.perf_counter()
        if self.rank == 0:
            step_s = now_s - self._last_s
            self._metrics.plain_step(
                self.step_count, loss=float(loss), samples=samples, step_s=step_s, waited_s=min(step_s, self._waited_s)
            )
        self._last_s, self._waited_s = now_s, 0.0

    def log(self, **values: float) -> None:
        """Write numbers of your own to the run's events and to TensorBoard; worker 0's count."""
        if self.rank == 0:
            self._metrics.log(self.step_count, values)

    def say(self, line: str) -> None:
        """Tell the user; worker 0 speaks for all."""
        if self.rank == 0:
            print(line, file=sys.stderr)

    def finish(self) -> None:
        """Write that this worker did what it had to."""
        self._metrics.end(self.step_count, self._memory.read())

    def close(self) -> None:
        """Close the files."""
        self._metrics.close()


def run_program(program: Program, folder: RunFolder, *, rank: Rank, store: Store | None, log: EventLog) -> None:
    """Be one worker of a program, to its end. Called by every worker."""
    set_threads(rank)
    torch.manual_seed(program.seed)
    run = ProgramRun(program, folder, rank=rank, device=pick_device(rank), log=log)
    try:
        if store is None:
            program.main(run)
        else:
            with serving(rank, store, timeout_s=program.call_timeout_s, threads=program.threads):
                program.main(run)
        run.finish()
    finally:
        run.close()


def prepare_program(program: Program, plan: Plan, asked: Asked, *, holds: ExitStack | None = None) -> RunFolder:
    """Make the run folder of a program: everything a worker needs to start.

    The run is held until `holds` is closed; without that, until this returns: whoever starts it later holds it then.
    """
    plain = Plan(mesh=Mesh(replicate=plan.workers), timeout_s=plan.timeout_s, on_loss=plan.on_loss)
    if plan != plain or asked.trace:
        raise PlanError(
            "a shoal.Program has no model to lay a plan over. Of all that says how to train, only --workers, --steps, "
            "--name, --log and --slurm with what belongs to it are for it: leave the rest out."
        )
    stem = asked.file.stem if asked.file else "run"
    folder = RunFolder.create(asked.runs, asked.name, stem=stem)
    with ExitStack() as here:
        (here if holds is None else holds).enter_context(held(folder))
        if asked.file:
            shutil.copyfile(asked.file, folder.code / asked.file.name)
        log = JobRecord.log if asked.loggers is None else asked.loggers
        write_toml(folder.job_toml, replace(_record(program, asked.file, asked.variable), log=log))
        write_toml(folder.plan_toml, plan)
        write_toml(folder.cluster_toml, asked.elsewhere or this_host())
        write_toml(folder.run_toml, run_record(folder, plan))  # last: a folder with run.toml is complete
    return folder


def _record(program: Program, file: Path | None, variable: str) -> JobRecord:
    return JobRecord(
        file=str(file.resolve()) if file else "",
        variable=variable,
        num_samples=0,
        batch_size=0,
        steps=program.total_steps,
        seed=program.seed,
        unit=program.unit,
        is_program=True,
    )

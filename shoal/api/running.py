"""Runs, from their folder to how they ended: by workers that are started here, or as one of them in this process."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

from rich.console import Console
from torch.distributed import Store

from shoal.comm.rank import ALONE, Rank, read_rank
from shoal.comm.store import connect
from shoal.core.errors import ConfigError, ShoalError, Stopped
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.script import ending_of
from shoal.data.stage.lifetime import copied_out
from shoal.fault import inject
from shoal.fault.preempt import last_step, preemptible
from shoal.launch.cause import find_cause
from shoal.launch.local import Watch, launch_local
from shoal.launch.nursery import await_early
from shoal.launch.starting import workers_of
from shoal.report.live.view import LiveView
from shoal.report.page.conclude import conclude
from shoal.report.summary import Summary, summarize
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.spec.program import Program
from shoal.training.host import Say
from shoal.training.loggers.following import followed
from shoal.training.loop import listening, train_all
from shoal.training.opening import open_run
from shoal.training.prepare import Asked, prepare_run
from shoal.training.program import prepare_program, run_program
from shoal.training.run import Run
from shoal.training.worker import report_error


def train_here(job: Job | Program, plan: Plan, asked: Asked) -> Summary:
    """Be a worker of this run, or all of it, in this process."""
    if isinstance(job, Program):
        return _run_here(job, plan, asked)
    with joined(job, plan, asked) as run, _view(run) as view:
        train_all(run, on_step=view.poll)
    return summarize(run.folder)


def _run_here(program: Program, plan: Plan, asked: Asked) -> Summary:
    with _recorded(program, plan, asked) as (folder, rank, store, log):
        run_program(program, folder, rank=rank, store=store, log=log)
    return summarize(folder)


@contextmanager
def joined(job: Job, plan: Plan, asked: Asked) -> Iterator[Run]:
    """Be a worker of a run of `job` for the length of a `with` block. Called by every worker."""
    with _recorded(job, plan, asked) as (folder, rank, store, log):

        def last_words(said: str) -> None:
            log.write("error", type=Stopped.__name__, message=said, traceback="")
            if rank.index == 0:
                folder.write_result("stopped", said)

        inject.begin(rank.index)
        inject.at("start")
        with (
            preemptible(last_words=last_words, last_saved=lambda: last_step(folder.checkpoints)) as preemption,
            open_run(job, folder, rank=rank, store=store, log=log) as run,
            listening(run, preemption),
        ):
            yield run


@contextmanager
def _recorded(job: Job | Program, plan: Plan, asked: Asked) -> Iterator[tuple[RunFolder, Rank, Store | None, EventLog]]:
    """Have a run folder and an event log of this worker, and write down how it ended. Called by every worker."""
    rank = read_rank() or ALONE
    store = connect(rank, timeout_s=plan.timeout_s) if rank.workers > 1 else None
    with ExitStack() as holds:
        folder = _agree_on_folder(job, plan, asked, rank=rank, store=store, holds=holds)
        following = followed(folder, say=_say(stderr_console())) if rank.index == 0 else nullcontext()
        with following, _ended(folder, rank) as log:
            yield folder, rank, store, log


@contextmanager
def _ended(folder: RunFolder, rank: Rank) -> Iterator[EventLog]:
    """Have the event log of this worker, and write down how it ended."""
    log = EventLog(folder.events_of(rank.index))
    status, message = "stopped", ""
    try:
        yield log
        status = "done"
    except Exception as error:
        status, message = ending_of(error), str(error)
        report_error(error, log)
        raise
    finally:
        log.close()
        if rank.index == 0:
            conclude(folder, status, message)


def launch(job: Job | Program, plan: Plan, asked: Asked, *, console: Console) -> Summary:
    """Train `job`, which a file holds, by worker processes on this machine, and show how it goes."""
    await_early()  # before the speed of this machine is measured
    with ExitStack() as holds:
        folder = _prepare(job, plan, asked, say=_say(console), holds=holds)
        with copied_out(folder.path, say=_say(console)) as kept, followed(folder, say=_say(console)):
            run_workers(folder, job, plan, console=console)
    return summarize(RunFolder.open(kept))


def _prepare(job: Job | Program, plan: Plan, asked: Asked, *, say: Say, holds: ExitStack) -> RunFolder:
    if isinstance(job, Program):
        return prepare_program(job, plan, asked, holds=holds)
    return prepare_run(job, plan, asked, say=say, holds=holds)


def run_workers(folder: RunFolder, job: Job | Program, plan: Plan, *, console: Console) -> None:
    """Run the workers of a prepared run on this machine, show how it goes, and write down how it ended."""
    status, message = "failed", ""
    try:
        with LiveView(folder, steps=job.total_steps, unit=job.unit, console=console) as view:
            watch, starting = Watch.by(view.print, on_tick=view.poll), workers_of(folder.path)
            # A worker of a program that is lost cannot come back into torch's RPC.
            goes_on = plan.goes_on and not isinstance(job, Program)
            on_loss = plan.on_loss if goes_on else None
            workers = launch_local(
                starting,
                workers=plan.workers,
                timeout_s=plan.timeout_s,
                watch=watch,
                on_loss=on_loss,
                folder=folder,
            )
        cause = find_cause(folder, workers)
        if cause is not None:
            raise cause
        status = "done"
    except ShoalError as error:
        status, message = ending_of(error), str(error)
        raise
    finally:
        conclude(folder, status, message)


def _agree_on_folder(
    job: Job | Program, plan: Plan, asked: Asked, *, rank: Rank, store: Store | None, holds: ExitStack
) -> RunFolder:
    """Worker 0 makes the run folder, holds it and tells the others where it is. Called by every worker."""
    if plan.workers != rank.workers:
        raise ConfigError(
            f"the plan has {plan.workers} workers, but this script was started as {rank.workers}. "
            f"Start it with: torchrun --nproc-per-node {plan.workers} {Path(sys.argv[0]).name}"
        )
    if rank.index == 0:
        folder = _prepare(job, plan, asked, say=_say(stderr_console()), holds=holds)
        if store is not None:
            store.set("run", str(folder.path.resolve()))
        return folder
    assert store is not None
    return RunFolder.open(Path(store.get("run").decode()))


def _view(run: Run) -> LiveView:
    console = stderr_console() if run.rank.index == 0 else Console(quiet=True)
    return LiveView(run.folder, steps=run.job.total_steps, unit=run.job.unit, console=console)


def stderr_console() -> Console:
    """Return where lines for a person go: standard output may be a program's."""
    return Console(stderr=True)


def _say(console: Console) -> Say:
    # Not as markup: a path may have [brackets] in it.
    return lambda line: console.print(line, markup=False, highlight=False)

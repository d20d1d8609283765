"""The main of a worker process: `python -m shoal worker RUN`. It never knows who started it."""

import functools
import os
import sys
import traceback
from pathlib import Path

from shoal.comm.failure import is_peer_failure
from shoal.comm.rank import ALONE, Rank, read_rank
from shoal.comm.store import connect
from shoal.comm.torch_private import has_abandoned_groups
from shoal.core.errors import PeerLost, PlanError, ShoalError, Stopped, WorkerFailed
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.fault import inject
from shoal.fault.preempt import Preemption, last_step, preemptible
from shoal.spec.plan import Plan
from shoal.spec.program import Program
from shoal.spec.record import JobRecord
from shoal.training.elastic import train_elastic
from shoal.training.jobfile import load_any, load_job
from shoal.training.loop import train_all
from shoal.training.opening import open_run
from shoal.training.program import run_program


def work(path: Path, *, is_watched: bool) -> int:
    """Be one worker of the run at `path`, to its end, and return the exit code.

    An error's last words go into the event log; where no launcher of ours watches that, to stderr as well.
    """
    folder = RunFolder.open(path)
    rank = read_rank() or ALONE
    log = EventLog(folder.events_of(rank.index))
    last_words = functools.partial(log.write, "error", type=Stopped.__name__, traceback="")
    exit_code = 0
    try:
        inject.begin(rank.index)
        inject.at("start")
        if (record := read_toml(JobRecord, folder.job_toml)).is_program:
            serve_program(folder, record, rank=rank, log=log)
            return 0
        with preemptible(
            last_words=lambda message: last_words(message=message), last_saved=lambda: last_step(folder.checkpoints)
        ) as preemption:
            train_run(folder, rank=rank, log=log, preemption=preemption)
    except Exception as error:
        known = report_error(error, log)
        if not is_watched:
            traceback.print_exc() if isinstance(known, WorkerFailed) else print(known, file=sys.stderr)
        exit_code = known.exit_code
    finally:
        log.close()
    if has_abandoned_groups():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)  # Python's own way out would free them, and may wait for ever
    return exit_code


def train_run(folder: RunFolder, *, rank: Rank, log: EventLog, preemption: Preemption | None = None) -> None:
    """Train the run in `folder` to its end, as worker `rank`. Called by every worker."""
    plan, record = read_toml(Plan, folder.plan_toml), read_toml(JobRecord, folder.job_toml)
    if plan.workers != rank.workers:
        raise PlanError(f"the plan has {plan.workers} workers, but {rank.workers} were started. Start {plan.workers}.")
    file = Path(record.file)
    job = load_job(file, source=folder.code / file.name, variable=record.variable).with_steps(record.steps)
    if rank.member and plan.goes_on:
        meeting = connect(rank, timeout_s=plan.timeout_s)
        train_elastic(
            job, plan, folder, rank=rank, store=meeting, log=log, preemption=preemption, recorded=record.recorded
        )
        return
    store = connect(rank, timeout_s=plan.timeout_s) if rank.workers > 1 else None
    with open_run(job, folder, rank=rank, store=store, log=log, recorded=record.recorded) as run:
        train_all(run, preemption=preemption)


def serve_program(folder: RunFolder, record: JobRecord, *, rank: Rank, log: EventLog) -> None:
    """Be one worker of the program in `folder`, to its end. Called by every worker."""
    plan, file = read_toml(Plan, folder.plan_toml), Path(record.file)
    program = load_any(file, source=folder.code / file.name, variable=record.variable)
    assert isinstance(program, Program)
    store = connect(rank, timeout_s=plan.timeout_s) if rank.workers > 1 else None
    run_program(program.with_steps(record.steps or None), folder, rank=rank, store=store, log=log)


def report_error(error: Exception, log: EventLog) -> ShoalError:
    """Write `error` to the event log and return it as what it means: itself, another worker's loss, or a failure."""
    known = error if isinstance(error, ShoalError) else WorkerFailed(f"{type(error).__name__}: {error}")
    if is_peer_failure(error):
        known = PeerLost(f"another worker is gone: {error}")
    is_ours = isinstance(known, WorkerFailed)
    log.write(
        "error",
        type=type(error).__name__ if is_ours else type(known).__name__,
        message=str(error if is_ours else known),
        traceback=traceback.format_exc() if is_ours else "",
    )
    return known

"""Opening a run as one of its workers, and ending it."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch.distributed import Store

from shoal.comm.alive import Watch
from shoal.comm.device import pick_device, set_threads
from shoal.comm.group import barrier, joined
from shoal.comm.rank import Rank
from shoal.comm.store import lone_store
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.fault.same import check_same_job
from shoal.fault.watch import watched
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.spec.record import Recorded
from shoal.training.run import Run
from shoal.training.snapshots import Keeping
from shoal.training.staging import Decision, StagedJob, staged_job

SILENT_S = 15.0
"""How long a worker may be silent before it counts as lost: a busy machine has silenced threads for seconds."""


@contextmanager
def open_run(
    job: Job, folder: RunFolder, *, rank: Rank, store: Store | None, log: EventLog, recorded: Recorded = "no"
) -> Iterator[Run]:
    """Be worker `rank` of the run in `folder` for the length of a `with` block. Called by every worker.

    `recorded`: write down what `shoal verify` compares.
    """
    plan = read_toml(Plan, folder.plan_toml)
    with opened(job, plan, folder, rank=rank, store=store, log=log, recorded=recorded) as run:
        yield run
        end(run)


@contextmanager
def opened(
    job: Job,
    plan: Plan,
    folder: RunFolder,
    *,
    rank: Rank,
    store: Store | None,
    log: EventLog,
    recorded: Recorded = "no",
    on_watch: Callable[[Watch | None], None] = lambda _: None,
    keeping: Keeping | None = None,
    stagings: list[ExitStack] | None = None,
) -> Iterator[Run]:
    """Be worker `rank` of a run under `plan`, which may end before the job does. Called by every worker.

    `keeping` says how its state is kept in memory; without it, it is not. `on_watch` is told who watches the others, as
    soon as that is so. `stagings` hold the copies of packs that were made for the generation before: they are let go
    when this one has its own, which stay open there.
    """
    set_threads(rank)
    device = pick_device(rank)
    with (
        joined(rank, store or _own_store(plan), device=device, timeout_s=plan.timeout_s),
        watched(store, rank, timeout_s=plan.timeout_s, silent_s=SILENT_S, log=log) as watch,
        _staged(job, plan, rank=rank, store=store, stagings=stagings) as staged,
    ):
        on_watch(watch)
        check_same_job(store, rank, job, plan, watch)
        run = Run(
            job,
            plan,
            folder,
            rank=rank,
            store=store,
            device=device,
            log=log,
            watch=watch,
            recorded=recorded,
            keeping=keeping,
        )
        try:
            if keeping is None or keeping.generation == 0:
                _note_staging(run, staged.decisions, log)
            run.job = staged.job  # only now: the model is built meanwhile, and waits for no part
            yield run
        finally:
            run.close()


def _own_store(plan: Plan) -> Store | None:
    """Return what a worker alone forms a group with, where its engine needs one."""
    return lone_store() if plan.engine == "deepspeed" else None


@contextmanager
def _staged(
    job: Job, plan: Plan, *, rank: Rank, store: Store | None, stagings: list[ExitStack] | None
) -> Iterator[StagedJob]:
    if stagings is None:
        with staged_job(job, plan, rank=rank, store=store) as staged:
            yield staged
        return
    opened_now = ExitStack()
    staged = opened_now.enter_context(staged_job(job, plan, rank=rank, store=store))
    before, stagings[:] = list(stagings), [opened_now]
    for staging in before:
        staging.close()
    yield staged


def _note_staging(run: Run, decisions: Sequence[Decision], log: EventLog) -> None:
    """Say where the packs of the job are read, and why; each node's first worker writes it down."""
    for decision in decisions:
        run.say(str(decision))
        if run.rank.local_index == 0:
            log.write("staging", **dataclasses.asdict(decision))


def end(run: Run) -> None:
    """Write down that all is done. Called by every worker, at the end of the job."""
    run.finish()
    if run.rank.workers > 1:
        barrier()  # whoever reads the run folder next finds every worker's end in it

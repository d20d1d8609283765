"""One plan against one process, through the pool: what the contract suite and docs/parallel.md are made of."""

from pathlib import Path

from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.plan import Plan
from shoal.spec.record import Recorded
from shoal.training.loop import train_all
from shoal.training.opening import open_run
from shoal.training.resolve import resolve_plan
from tests.support.ranks import RankPool
from tests.support.training import build


def record_part(rank: Rank, *, case: str, folder: Path, recorded: Recorded = "plain", **settings: int) -> None:
    """Be one worker of a recorded run of the job that `case` ("module:function") builds. Runs in the pool."""
    job = build(case, **settings)
    run_folder = RunFolder(folder)
    log = EventLog(run_folder.events_of(rank.index))
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    try:
        with open_run(job, run_folder, rank=rank, store=store, log=log, recorded=recorded) as run:
            train_all(run)
    finally:
        log.close()


def record(
    ranks: RankPool, case: str, plan: Plan, *, folder: Path, recorded: Recorded = "plain", **settings: int
) -> RunFolder:
    """Train `case`, built with `settings`, under `plan`, which is held against it first, and return the run."""
    plan, _ = resolve_plan(build(case, **settings), plan)
    run_folder = RunFolder.create(folder, None, stem="run")
    write_toml(run_folder.plan_toml, plan)
    ranks.run(record_part, workers=plan.workers, case=case, folder=run_folder.path, recorded=recorded, **settings)
    return run_folder

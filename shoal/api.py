"""What people call from Python; the verbs of the command line call the same."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from torch.distributed import Store

from shoal.comm.rank import ALONE, Rank, read_rank
from shoal.comm.store import connect
from shoal.core.errors import ConfigError, PlanError, ShoalError, Stopped
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.script import ending_of, main_file, origin_of
from shoal.core.toml import read_toml
from shoal.data.stage.lifetime import copied_out
from shoal.fault import inject
from shoal.fault.preempt import last_step, preemptible
from shoal.launch.cause import find_cause
from shoal.launch.local import Watch, launch_local
from shoal.launch.starting import workers_of
from shoal.planner.memory.fit import Estimate
from shoal.planner.search.ranking import Ranking
from shoal.report.live import LiveView
from shoal.report.page import write_page
from shoal.report.summary import Summary, summarize
from shoal.spec.cluster import Cluster
from shoal.spec.job import Job
from shoal.spec.plan import Mesh, Plan
from shoal.training.fitting import fit_job
from shoal.training.host import Say, this_host
from shoal.training.jobfile import load_job
from shoal.training.loop import listening, train_all
from shoal.training.opening import open_run
from shoal.training.planning import plan_job
from shoal.training.prepare import prepare_run, write_run
from shoal.training.resolve import one_process, resolve_plan
from shoal.training.run import Run
from shoal.training.verify import TOLERANCE, Verdict, compare_runs
from shoal.training.worker import report_error


def train(
    job: Job,
    *,
    workers: int | None = None,
    plan: Plan | str | Path | None = None,
    steps: int | None = None,
    name: str | None = None,
    runs: str | Path = "runs",
) -> Summary:
    """Train `job` and return what came of it.

    One worker trains in this process. More are started on this machine, and read the job from the script that called:
    it must be a variable of that script. Under torchrun or srun, this process is one of the workers they started.
    """
    job = job.with_steps(steps)
    plan = _resolve(plan, workers)
    if read_rank() is None and plan.workers > 1:
        file, variable = origin_of(job)
        return launch(job, plan, file=file, variable=variable, name=name, runs=Path(runs), console=_console())
    return _train_here(job, plan, file=main_file(), name=name, runs=Path(runs))


def fit(job: Job, *, device: str | None = None, micro_batch: int | None = None, precision: str = "fp32") -> Estimate:
    """Return whether `job` fits one `device` of the catalog (without one, this machine's), and what would make it fit.

    The model is traced on fake tensors: that takes no GPU, and none of the memory it needs.
    """
    return fit_job(job, device=device, micro_batch=micro_batch, precision=precision)


def plan(job: Job, cluster: Cluster | str | Path | None = None, *, precision: str = "fp32", keep: int = 5) -> Ranking:
    """Return the `keep` best plans for `job` on `cluster` (a file's path will do), or on this machine.

    A calibration beside the cluster's file is used. The best is `ranking.plans[0].plan`.
    """
    folder = Path()
    if isinstance(cluster, (str, Path)):
        folder, cluster = Path(cluster).parent, read_toml(Cluster, Path(cluster))
    return plan_job(job, cluster, precision=precision, keep=keep, folder=folder)


def verify(
    job: Job,
    plan: Plan | str | Path,
    *,
    steps: int = 20,
    tolerance: float = TOLERANCE,
    name: str | None = None,
    runs: str | Path = "runs",
) -> Verdict:
    """Train `job` for some steps in one process and under `plan`, and return whether that was the same.

    Losses, gradients and final parameters are compared, each by its relative difference. Like `train` with several
    workers, this needs the job in a variable of the script that was started.
    """
    file, variable = origin_of(job)
    settings = {"steps": steps, "tolerance": tolerance, "name": name, "runs": Path(runs)}
    return verify_file(file, _resolve(plan, None), variable=variable, console=_console(), **settings)  # type: ignore[arg-type]


def verify_file(
    file: Path,
    plan: Plan,
    *,
    variable: str = "job",
    steps: int,
    tolerance: float,
    name: str | None,
    runs: Path,
    console: Console,
) -> Verdict:
    """Return whether `plan` trains the job in `file` as one process does: two runs, one after the other."""
    if plan.sync.mode != "all-reduce":
        raise PlanError(
            f"sync.mode={plan.sync.mode!r} trains otherwise than one process does, on purpose. Verify the plan with "
            "sync.mode='all-reduce'."
        )
    job = load_job(file, variable=variable).with_steps(steps)
    resolved, profile = resolve_plan(job, plan)
    stem = name or f"{file.stem}-verify"
    folders = []
    for label, each in (("one process", one_process(plan, profile)), ("the plan", resolved)):
        console.print(f"{file.name}: {steps} steps, {label} ...", highlight=False, markup=False)
        folder = RunFolder.create(runs, None, stem=stem)
        write_run(folder, job, each, this_host(), file=file, variable=variable, is_recorded=True)
        folders.append(folder)
        _run_workers(folder, job, each, console=console)
    return compare_runs(*folders, tolerance=tolerance)


def train_file(
    file: Path,
    plan: Plan,
    *,
    steps: int | None,
    name: str | None,
    runs: Path,
    cluster: Path | None = None,
    console: Console,
) -> Summary:
    """Train the job in `file` under `plan`: by workers started here, or as one that torchrun or srun started."""
    job = load_job(file).with_steps(steps)
    if read_rank() is None:
        return launch(job, plan, file=file, variable="job", name=name, runs=runs, cluster=cluster, console=console)
    return _train_here(job, plan, file=file, name=name, runs=runs, cluster=cluster)


def _train_here(
    job: Job, plan: Plan, *, file: Path | None, name: str | None, runs: Path, cluster: Path | None = None
) -> Summary:
    with _joined(job, plan, file=file, name=name, runs=runs, cluster=cluster) as run, _view(run) as view:
        train_all(run, on_step=view.poll)
    return summarize(run.folder)


@contextmanager
def start(
    job: Job, *, plan: Plan | str | Path | None = "auto", name: str | None = None, runs: str | Path = "runs"
) -> Iterator[Run]:
    """Be a worker of a run of `job`, with a loop of your own. Called by every worker.

    "auto" plans plain data parallelism over the workers that torchrun or srun started; without them, there is one.
    """
    with _joined(job, _resolve(plan, None), file=main_file(), name=name, runs=Path(runs)) as run:
        yield run


@contextmanager
def _joined(
    job: Job, plan: Plan, *, file: Path | None, name: str | None, runs: Path, cluster: Path | None = None
) -> Iterator[Run]:
    rank = read_rank() or ALONE
    store = connect(rank, timeout_s=plan.timeout_s) if rank.workers > 1 else None
    folder = _agree_on_folder(job, plan, rank, store, file=file, name=name, runs=runs, cluster=cluster)
    log = EventLog(folder.events_of(rank.index))
    status, message = "stopped", ""

    def last_words(said: str) -> None:
        log.write("error", type=Stopped.__name__, message=said, traceback="")
        if rank.index == 0:
            folder.write_result("stopped", said)

    inject.begin(rank.index)
    inject.at("start")
    try:
        with (
            preemptible(last_words=last_words, last_saved=lambda: last_step(folder.checkpoints)) as preemption,
            open_run(job, folder, rank=rank, store=store, log=log) as run,
            listening(run, preemption),
        ):
            yield run
        status = "done"
    except Exception as error:
        status, message = ending_of(error), str(error)
        report_error(error, log)
        raise
    finally:
        log.close()
        if rank.index == 0:
            _conclude(folder, status, message)


def launch(
    job: Job,
    plan: Plan,
    *,
    file: Path,
    variable: str,
    name: str | None,
    runs: Path,
    cluster: Path | None = None,
    console: Console,
) -> Summary:
    """Train `job`, which `file` holds in `variable`, by worker processes on this machine, and show how it goes."""
    folder = prepare_run(
        job, plan, file=file, variable=variable, runs=runs, name=name, cluster=cluster, say=_say(console)
    )
    with copied_out(folder.path, say=_say(console)) as kept:
        _run_workers(folder, job, plan, console=console)
    return summarize(RunFolder.open(kept))


def _run_workers(folder: RunFolder, job: Job, plan: Plan, *, console: Console) -> None:
    """Run the workers of a prepared run on this machine, show how it goes, and write down how it ended."""
    status, message = "failed", ""
    try:
        with LiveView(folder, steps=job.total_steps, unit=job.unit, console=console) as view:
            watch, starting = Watch.by(view.print, on_tick=view.poll), workers_of(folder.path)
            workers = launch_local(
                starting, workers=plan.workers, timeout_s=plan.timeout_s, watch=watch, on_loss=plan.on_loss
            )
        cause = find_cause(folder, workers)
        if cause is not None:
            raise cause
        status = "done"
    except ShoalError as error:
        status, message = ending_of(error), str(error)
        raise
    finally:
        _conclude(folder, status, message)


def _conclude(folder: RunFolder, status: str, message: str) -> None:
    folder.write_result(status, message)
    write_page(folder)


def _resolve(plan: Plan | str | Path | None, workers: int | None) -> Plan:
    """Return the plan that was asked for: itself, from a file, or plain data parallelism over the workers."""
    if plan is not None and plan != "auto":
        if workers is not None:
            raise ConfigError(f"workers={workers} beside a plan, which has its own number. Give one of the two.")
        return plan if isinstance(plan, Plan) else read_toml(Plan, Path(plan))
    rank = read_rank()
    return Plan(mesh=Mesh(replicate=workers or (rank.workers if rank else 1)))


def _agree_on_folder(
    job: Job,
    plan: Plan,
    rank: Rank,
    store: Store | None,
    *,
    file: Path | None,
    name: str | None,
    runs: Path,
    cluster: Path | None,
) -> RunFolder:
    """Worker 0 makes the run folder and tells the others where it is. Called by every worker."""
    if plan.workers != rank.workers:
        raise ConfigError(
            f"the plan has {plan.workers} workers, but this script was started as {rank.workers}. "
            f"Start it with: torchrun --nproc-per-node {plan.workers} {Path(sys.argv[0]).name}"
        )
    if rank.index == 0:
        folder = prepare_run(job, plan, file=file, runs=runs, name=name, cluster=cluster, say=_say(_console()))
        if store is not None:
            store.set("run", str(folder.path.resolve()))
        return folder
    assert store is not None
    return RunFolder.open(Path(store.get("run").decode()))


def _view(run: Run) -> LiveView:
    console = _console() if run.rank.index == 0 else Console(quiet=True)
    return LiveView(run.folder, steps=run.job.total_steps, unit=run.job.unit, console=console)


def _console() -> Console:
    return Console(stderr=True)


def _say(console: Console) -> Say:
    # Not as markup: a path may have [brackets] in it.
    return lambda line: console.print(line, markup=False, highlight=False)

"""What people call from Python; the verbs of the command line call the same."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from shoal.api.running import joined, launch, run_workers, stderr_console, train_here
from shoal.comm.rank import read_rank
from shoal.core.errors import PlanError
from shoal.core.run_folder import RunFolder
from shoal.core.run_lock import held
from shoal.core.script import main_file, origin_of
from shoal.core.toml import read_toml
from shoal.planner.memory.fit import Estimate
from shoal.planner.search.ranking import Ranking
from shoal.report.summary import Summary
from shoal.spec.cluster import Cluster
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.spec.program import Program
from shoal.spec.record import Recorded
from shoal.training.fitting import fit_job
from shoal.training.host import this_host
from shoal.training.jobfile import load_any, load_job
from shoal.training.planning import plan_job
from shoal.training.prepare import Asked, write_run
from shoal.training.resolve import asked_plan, one_process, resolve_plan
from shoal.training.run import Run
from shoal.training.verify import TOLERANCE, Verdict, compare_runs


def train(
    job: Job | Program,
    *,
    workers: int | None = None,
    plan: Plan | str | Path | None = None,
    steps: int | None = None,
    name: str | None = None,
    runs: str | Path = "runs",
    trace: str = "",
    log: str | Iterable[str] | None = None,
) -> Summary:
    """Train `job`, or run a program, and return what came of it.

    One worker trains in this process. More are started on this machine, and read the job from the script that called:
    it must be a variable of that script. Under torchrun or srun, this process is one of the workers they started.
    `workers` is plain data parallelism over so many; `plan`, a Plan or the path of one, says anything else. `steps`
    instead of the job's own length. The run's folder is `name` (without it, the script's name, numbered) in `runs`.
    `trace`: the steps of which each worker writes what it did, moment by moment, as "100:103". `log`: where its numbers
    go, "tensorboard,wandb,mlflow" or some of them.
    """
    job = job.with_steps(steps)
    plan = asked_plan(plan, workers)
    if read_rank() is None and plan.workers > 1:
        file, variable = origin_of(job)
        asked = Asked(file=file, variable=variable, name=name, runs=Path(runs), trace=trace, log=log)
        return launch(job, plan, asked, console=stderr_console())
    asked = Asked(file=main_file(), name=name, runs=Path(runs), trace=trace, log=log)
    return train_here(job, plan, asked)


def fit(job: Job, *, device: str | None = None, micro_batch: int | None = None, precision: str = "fp32") -> Estimate:
    """Return whether `job` fits one `device` of the catalog (without one, this machine's), and what would make it fit.

    The model is traced on fake tensors: that takes no GPU, and none of the memory it needs. `micro_batch` is the
    samples in one forward (without it, the whole batch), `precision` "fp32" or "bf16".
    """
    return fit_job(job, device=device, micro_batch=micro_batch, precision=precision)


def plan(job: Job, cluster: Cluster | str | Path | None = None, *, precision: str = "fp32", keep: int = 5) -> Ranking:
    """Return the `keep` best plans for `job` on `cluster` (a file's path will do), or on this machine.

    A calibration beside the cluster's file is used. The best is `ranking.plans[0].plan`. `precision`: "fp32" or "bf16".
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

    Losses, gradients and final parameters are compared over `steps`, each by its relative difference: equal is up to
    `tolerance`. Both runs are called `name`, numbered, in `runs`. Like `train` with several workers, this needs the job
    in a variable of the script that was started.
    """
    file, variable = origin_of(job)
    settings = {"steps": steps, "tolerance": tolerance, "name": name, "runs": Path(runs)}
    return verify_file(file, asked_plan(plan, None), variable=variable, console=stderr_console(), **settings)  # type: ignore[arg-type]


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
    """Return whether `plan` trains the job in `file` as one process does: two runs, one after the other.

    Where they differ, a third says how far rounding alone would bring them apart.
    """
    if plan.sync.mode != "all-reduce":
        raise PlanError(
            f"sync.mode={plan.sync.mode!r} trains otherwise than one process does, on purpose. Verify the plan with "
            "sync.mode='all-reduce'."
        )
    job = load_job(file, variable=variable).with_steps(steps)
    resolved, profile = resolve_plan(job, plan)
    stem = name or f"{file.stem}-verify"
    alone = one_process(plan, profile)

    def recorded(label: str, each: Plan, how: Recorded = "plain") -> RunFolder:
        console.print(f"{file.name}: {steps} steps, {label} ...", highlight=False, markup=False)
        folder = RunFolder.create(runs, None, stem=stem)
        write_run(folder, job, each, this_host(), file=file, variable=variable, recorded=how)
        with held(folder):
            run_workers(folder, job, each, console=console)
        return folder

    one, other = recorded("one process", alone), recorded("the plan", resolved)
    verdict = compare_runs(one, other, tolerance=tolerance)
    if verdict.equal:
        return verdict
    nudged = recorded("they differ: one process again, its weights one rounding apart", alone, "nudged")
    return compare_runs(one, other, nudged=nudged, tolerance=tolerance)


def train_file(
    file: Path,
    plan: Plan,
    *,
    steps: int | None,
    name: str | None,
    runs: Path,
    cluster: Path | None = None,
    trace: str = "",
    log: tuple[str, ...] | None = None,
    console: Console,
) -> Summary:
    """Train the job in `file` under `plan`: by workers started here, or as one that torchrun or srun started."""
    job = load_any(file).with_steps(steps)
    asked = Asked(file=file, name=name, runs=runs, cluster=cluster, trace=trace, log=log)
    if read_rank() is None:
        return launch(job, plan, asked, console=console)
    return train_here(job, plan, asked)


@contextmanager
def start(
    job: Job,
    *,
    plan: Plan | str | Path | None = "auto",
    name: str | None = None,
    runs: str | Path = "runs",
    trace: str = "",
    log: str | Iterable[str] | None = None,
) -> Iterator[Run]:
    """Be a worker of a run of `job`, with a loop of your own. Called by every worker.

    `plan="auto"` is plain data parallelism over the workers that torchrun or srun started; without them, there is one.
    The run's folder is `name` (without it, the script's name, numbered) in `runs`. `trace`, `log`: as in `train`.
    """
    asked = Asked(file=main_file(), name=name, runs=Path(runs), trace=trace, log=log)
    with joined(job, asked_plan(plan, None), asked) as run:
        yield run

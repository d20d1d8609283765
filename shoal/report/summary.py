"""What a run folder says about its run, in one value: the table and the page are drawn from it."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import ShoalError
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.report.log import Step, WorkerLog, clean, read_log
from shoal.report.missing import missing_from_logs, ranks_in_words
from shoal.report.steady import Worker, mean_parts, per_second, slowest_of, steady_worker, warm_up
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan, Predicted
from shoal.spec.record import JobRecord, RunRecord

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One run, measured; None stands for what the folder does not say."""

    run: str
    status: str
    """done, failed, stopped or unfinished."""
    message: str
    workers: int
    planned_steps: int | None
    step_numbers: tuple[int, ...]
    """The steps that some worker logged, in order."""
    losses: tuple[float | None, ...]
    """The loss of each of them, from the lowest rank that has it; None where it was not finite."""
    split: tuple[tuple[float, ...], ...]
    """The seconds of `STEP_PARTS` in each of them, the mean over the workers."""
    warm_up_steps: int
    """How many of the first steps are left out of all means (see steady.py)."""
    samples_per_s: float | None
    """Samples of a steady step, summed over the workers, over its seconds, data loading included."""
    units_per_s: float | None
    """The same for what the job's `weight` counts: `unit`."""
    unit: str
    wall_s: float | None
    """From the first event of the run to its last."""
    slowest: Worker | None
    """The worker the others wait for."""
    per_worker: tuple[Worker, ...]
    evals: tuple[tuple[int, dict[str, float | None]], ...]
    """Each evaluation: its step and its metrics."""
    staging: tuple[str, ...]
    """Where the first node read each pack of the job, and why."""
    missing: tuple[str, ...]
    """A sentence for each thing that could not be read."""
    plan: Plan | None
    job: JobRecord | None
    record: RunRecord | None
    cluster: Cluster | None
    page: Path
    """Where the run's page is, or would be."""

    @property
    def steps(self) -> int:
        """How many steps were done."""
        return len(self.step_numbers)

    @property
    def step_s(self) -> float | None:
        """Seconds of a steady step of the slowest worker, without data loading, as `predicted.step_s` counts them."""
        return self.slowest.step_s if self.slowest else None

    @property
    def parts(self) -> dict[str, float] | None:
        """What a steady step of the slowest worker is made of, data loading included."""
        return self.slowest.parts if self.slowest else None

    @property
    def peak_bytes(self) -> tuple[int | None, ...]:
        """The most memory each worker held."""
        return tuple(worker.peak_bytes for worker in self.per_worker)

    @property
    def predicted(self) -> Predicted | None:
        """What the plan was predicted to cost."""
        return self.plan.predicted if self.plan else None

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics of the last evaluation."""
        return self.evals[-1][1] if self.evals else {}

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain JSON values."""
        names = "status message workers steps planned_steps losses samples_per_s units_per_s unit wall_s step_s"
        plain = {name: getattr(self, name) for name in f"{names} parts metrics".split()}
        return (
            {"run": str(self.page.parent)}
            | plain
            | {
                "losses": list(self.losses),
                "peak_bytes": list(self.peak_bytes),
                "predicted": asdict(self.predicted) | {"peak_bytes": list(self.predicted.peak_bytes)}
                if self.predicted
                else None,
                "evals": [{"step": step, "metrics": metrics} for step, metrics in self.evals],
                "per_worker": [asdict(worker) for worker in self.per_worker],
                "staging": list(self.staging),
                "missing": list(self.missing),
            }
        )


def summarize(run: RunFolder) -> Summary:
    """Return what `run` says about itself; what is absent or damaged becomes a sentence in `missing`."""
    missing: list[str] = []
    plan = _read(Plan, run.plan_toml, missing)
    job = _read(JobRecord, run.job_toml, missing)
    record = _read(RunRecord, run.run_toml, missing)
    cluster = _read(Cluster, run.cluster_toml, missing)
    result = run.read_result()
    status = clean(result.get("status", "unfinished"))
    logs = _read_logs(run, plan.workers if plan else None, missing)
    missing.extend(missing_from_logs(logs, status))
    numbers = tuple(sorted({number for log in logs for number in log.steps}))
    steps = [[log.steps[number] for log in logs if number in log.steps] for number in numbers]
    left_out = warm_up(numbers)
    is_apart = plan is not None and plan.sync.mode != "all-reduce"
    workers = tuple(steady_worker(log, left_out) for log in logs)
    return Summary(
        run=clean(run.name),
        status=status,
        message=clean(result.get("message", "")),
        workers=len(logs),
        planned_steps=job.steps if job else None,
        step_numbers=numbers,
        losses=tuple(_mean_loss(of_step) if is_apart else of_step[0].loss for of_step in steps),
        split=tuple(mean_parts(of_step) for of_step in steps),
        warm_up_steps=len(left_out),
        samples_per_s=per_second([worker.samples for worker in workers], workers, is_apart=is_apart),
        units_per_s=per_second([worker.weight for worker in workers], workers, is_apart=is_apart),
        unit=clean(job.unit) if job else "samples",
        wall_s=_wall_s(logs),
        slowest=slowest_of(workers),
        per_worker=workers,
        evals=_evals(logs),
        staging=tuple(logs[0].staging.values()) if logs else (),
        missing=tuple(missing),
        plan=plan,
        job=job,
        record=record,
        cluster=cluster,
        page=run.report_html,
    )


def _mean_loss(of_step: list[Step]) -> float | None:
    """Return the loss of a step on workers that were apart (sync.mode), and so have one each: the mean by weight."""
    losses = [step.loss for step in of_step if step.loss is not None]
    total = sum(step.weight for step in of_step)
    if len(losses) < len(of_step) or not total:
        return of_step[0].loss
    return sum(loss * step.weight for loss, step in zip(losses, of_step, strict=True)) / total


def _read(cls: type[T], path: Path, missing: list[str]) -> T | None:
    try:
        return read_toml(cls, path)
    except ShoalError as error:
        missing.append(clean(f"{path.name} cannot be used: {error}"))
        return None


def _read_logs(run: RunFolder, workers: int | None, missing: list[str]) -> list[WorkerLog]:
    """Return one log for each worker of the plan; without a plan, for each rank up to the highest that has one."""
    names = [re.fullmatch(r"rank-(\d{1,6})\.jsonl", path.name) for path in run.events.glob("rank-*.jsonl")]
    ranks = [int(match[1]) for match in names if match]
    if workers is None:
        workers = max(ranks, default=-1) + 1
        missing.append(f"Without a plan, the number of workers is taken from the logs: {workers}.")
    strangers = [rank for rank in ranks if rank >= workers]
    if strangers:
        missing.append(f"The plan has no {ranks_in_words(strangers)}: what is logged there is left out.")
    return [read_log(run.events_of(rank), rank) for rank in range(workers)]


def _evals(logs: list[WorkerLog]) -> tuple[tuple[int, dict[str, float | None]], ...]:
    by_step = {step: metrics for log in reversed(logs) for step, metrics in log.evals.items()}
    return tuple(sorted(by_step.items(), key=lambda item: item[0]))


def _wall_s(logs: list[WorkerLog]) -> float | None:
    starts = [log.first_time_s for log in logs if log.first_time_s is not None]
    ends = [log.last_time_s for log in logs if log.last_time_s is not None]
    return max(ends) - min(starts) if starts else None

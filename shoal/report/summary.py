"""What a run folder says about its run, in one value: the table and the page are drawn from it."""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from shoal.core.errors import ShoalError
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.launch.wishes import read_launcher
from shoal.report.logs.facts import Call, Fault, Loading, LoadingOver, MemoryOver, Saved, Shares, TraceFile, merge_calls
from shoal.report.logs.log import WorkerLog, clean
from shoal.report.logs.measured import Measured, StepTimes, Stretch, measure, per_second
from shoal.report.logs.missing import missing_from_logs, ranks_in_words
from shoal.report.logs.reading import is_large, read_large, read_small
from shoal.report.logs.starts import restarts
from shoal.report.logs.steady import Worker, slowest_of, worker_of
from shoal.report.split import PARTS
from shoal.spec.cluster import Cluster
from shoal.spec.communication import Communication
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
    stretches: tuple[Stretch, ...]
    """The split of the steps over time."""
    step_times: StepTimes | None
    warm_up_steps: int
    """How many of the first steps are left out of all means (see measured.py)."""
    samples_per_s: float | None
    """Samples of the steady steps' global batches over the seconds of these steps, data loading included."""
    units_per_s: float | None
    """The same for what the job's `weight` counts: `unit`."""
    unit: str
    wall_s: float | None
    """From the first event of the run to its last."""
    slowest: Worker | None
    """The worker the others wait for."""
    per_worker: tuple[Worker, ...]
    paces: tuple[tuple[float | None, ...], ...]
    """For each worker, the seconds it was busy in a step, over stretches that begin with `pace_steps`."""
    pace_steps: tuple[int, ...]
    loading_over: tuple[LoadingOver, ...]
    """What the loaders did over time."""
    memory: tuple[MemoryOver, ...]
    """What workers held over a step."""
    traces: tuple[TraceFile, ...]
    shares: tuple[Shares, ...]
    """The parts of a global batch, where they were changed."""
    faults: tuple[Fault, ...]
    """What went wrong or was mended, in order."""
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
    communication: Communication | None
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
    def split(self) -> dict[str, float]:
        """Seconds of `PARTS` in a steady step, the mean over the workers; empty where there is none."""
        known = [worker.split for worker in self.per_worker if worker.split]
        return {name: sum(split[name] for split in known) / len(known) for name in PARTS} if known else {}

    @property
    def fractions(self) -> list[tuple[str, float]]:
        """Each of the parts in `split` that there is, as a fraction of the whole step."""
        shown = [(name, self.split[name]) for name in PARTS if self.split.get(name, 0.0) > 0]
        whole_s = sum(seconds for _, seconds in shown)
        return [(name, seconds / whole_s) for name, seconds in shown]

    @property
    def peak_bytes(self) -> tuple[int | None, ...]:
        """The most memory each worker held."""
        return tuple(worker.peak_bytes for worker in self.per_worker)

    @property
    def predicted(self) -> Predicted | None:
        """What the plan was predicted to cost."""
        return self.plan.predicted if self.plan else None

    @property
    def loading(self) -> tuple[Loading, ...]:
        """What the loader of each worker did over the run, of those that have one."""
        return tuple(worker.loading for worker in self.per_worker if worker.loading)

    @property
    def calls(self) -> tuple[Call, ...]:
        """What the workers communicated over the run, summed over them; what took longest comes first."""
        found = merge_calls(call for worker in self.per_worker for call in worker.calls)
        return tuple(sorted(found, key=lambda call: -call.seconds))

    @property
    def calls_steps(self) -> int:
        """In how many steps of a worker that was."""
        return sum(worker.calls_steps for worker in self.per_worker)

    @property
    def saves(self) -> tuple[Saved, ...]:
        """The checkpoints, of the worker that waited for them longest."""
        return max((w.saved for w in self.per_worker), key=lambda saved: sum(s.stall_s for s in saved), default=())

    @property
    def gradient_bytes(self) -> int | None:
        """What the gradients take on the worker that holds most of them."""
        known = [w.state_bytes["gradients"] for w in self.per_worker if "gradients" in w.state_bytes]
        return int(max(known)) if known else None

    @property
    def metrics(self) -> dict[str, float | None]:
        """The metrics of the last evaluation."""
        return self.evals[-1][1] if self.evals else {}

    def as_json(self) -> dict[str, Any]:
        """Return the summary as plain JSON values, with what the report concludes from it."""
        from shoal.report.advice import advise, flags_of  # both are drawn from summaries
        from shoal.report.verdict import verdict

        names = (
            "status message workers steps planned_steps losses samples_per_s units_per_s unit wall_s step_s parts "
            "split metrics peak_bytes staging missing"
        )
        plain = {name: getattr(self, name) for name in names.split()}
        plain |= {
            "step_times": self.step_times._asdict() if self.step_times else None,
            "predicted": asdict(self.predicted) if self.predicted else None,
            "evals": [{"step": step, "metrics": metrics} for step, metrics in self.evals],
            "faults": [asdict(fault) for fault in self.faults],
            "per_worker": [asdict(worker) for worker in self.per_worker],
            "verdict": verdict(self),
            "advice": [asdict(each) | {"flags": flags_of(each.change or {})} for each in advise(self)],
        }
        return {"run": str(self.page.parent), **{name: _plain(value) for name, value in plain.items()}}


def summarize(run: RunFolder) -> Summary:
    """Return what `run` says about itself; what is absent or damaged becomes a sentence in `missing`."""
    missing: list[str] = []
    plan = _read(Plan, run.plan_toml, missing)
    job = _read(JobRecord, run.job_toml, missing)
    record = _read(RunRecord, run.run_toml, missing)
    cluster = _read(Cluster, run.cluster_toml, missing)
    # Only workers that meet by gradients write it, and not before they have met.
    communication = _read(Communication, run.communication_toml, missing) if run.communication_toml.exists() else None
    result = run.read_result()
    status = clean(result.get("status", "unfinished"))
    is_apart = plan is not None and plan.sync.mode != "all-reduce"
    logs, measured = _read_logs(_log_paths(run, plan.workers if plan else None, missing), is_apart=is_apart)
    missing.extend(missing_from_logs(logs, status, is_program=job is not None and job.is_program))
    workers = tuple(worker_of(log, means) for log, means in zip(logs, measured.means, strict=True))
    samples_per_s, units_per_s = per_second(measured, is_apart=is_apart)
    return Summary(
        run=clean(run.name),
        status=status,
        message=clean(result.get("message", "")),
        workers=len(logs),
        planned_steps=job.steps if job else None,
        step_numbers=measured.numbers,
        losses=measured.losses,
        stretches=measured.stretches,
        step_times=measured.step_times,
        warm_up_steps=measured.warm_up_steps,
        samples_per_s=samples_per_s,
        units_per_s=units_per_s,
        unit=clean(job.unit) if job else "samples",
        wall_s=_wall_s(logs),
        slowest=slowest_of(workers),
        per_worker=workers,
        paces=measured.paces,
        pace_steps=measured.pace_steps,
        loading_over=tuple(over for log in logs for over in log.loading),
        memory=tuple(over for log in logs for over in log.memory.values()),
        traces=tuple(trace for log in logs for trace in log.traces.values()),
        shares=tuple(shares for log in logs for shares in log.shares),
        faults=_faults(run, logs),
        evals=_evals(logs),
        staging=tuple(logs[0].staging.values()) if logs else (),
        missing=tuple(missing),
        plan=plan,
        job=job,
        record=record,
        cluster=cluster,
        communication=communication,
        page=run.report_html,
    )


def _plain(value: Any) -> Any:
    """Return `value` with lists in the place of tuples."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def _read(cls: type[T], path: Path, missing: list[str]) -> T | None:
    try:
        return read_toml(cls, path)
    except ShoalError as error:
        missing.append(clean(f"{path.name} cannot be used: {error}"))
        return None


def _log_paths(run: RunFolder, workers: int | None, missing: list[str]) -> list[Path]:
    """Return the log of each worker of the plan, and of those that were added to them (`shoal scale`).

    Without a plan, of each rank up to the highest that has one.
    """
    names = [re.fullmatch(r"rank-(\d{1,6})\.jsonl", path.name) for path in run.events.glob("rank-*.jsonl")]
    ranks = [int(match[1]) for match in names if match]
    if workers is None:
        workers = max(ranks, default=-1) + 1
        missing.append(f"Without a plan, the number of workers is taken from the logs: {workers}.")
    launcher = read_launcher(run)
    if launcher is not None:
        workers = max(workers, min(launcher.workers, max(ranks, default=-1) + 1))
    strangers = [rank for rank in ranks if rank >= workers]
    if strangers:
        missing.append(f"The plan has no {ranks_in_words(strangers)}: what is logged there is left out.")
    return [run.events_of(rank) for rank in range(workers)]


def _read_logs(paths: list[Path], *, is_apart: bool) -> tuple[list[WorkerLog], Measured]:
    if not is_large(paths):
        logs = [read_small(path, rank) for rank, path in enumerate(paths)]
        return logs, measure(logs, is_apart=is_apart)
    from shoal.report.logs.measured_large import LargeMeasure  # numpy and Arrow, which small runs do not pay for

    large, logs = LargeMeasure(is_apart=is_apart), []
    for rank, path in enumerate(paths):
        log, columns = read_large(path, rank)
        large.add(columns)
        logs.append(log)
    return logs, large.measured()


def _faults(run: RunFolder, logs: list[WorkerLog]) -> tuple[Fault, ...]:
    found = [*(fault for log in logs for fault in log.faults), *restarts(run)]
    return tuple(sorted(found, key=lambda fault: fault.time_s))


def _evals(logs: list[WorkerLog]) -> tuple[tuple[int, dict[str, float | None]], ...]:
    by_step = {step: metrics for log in reversed(logs) for step, metrics in log.evals.items()}
    return tuple(sorted(by_step.items(), key=lambda item: item[0]))


def _wall_s(logs: list[WorkerLog]) -> float | None:
    starts = [log.first_time_s for log in logs if log.first_time_s is not None]
    ends = [log.last_time_s for log in logs if log.last_time_s is not None]
    return max(ends) - min(starts) if starts else None

"""Before a run: hold the plan against the job, predict what it costs, and write the run folder that workers read."""

import dataclasses
import datetime
import importlib.metadata
import math
import platform
import shlex
import shutil
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import shoal
from shoal.core.run_folder import RunFolder
from shoal.core.run_lock import held, is_held
from shoal.core.toml import write_toml
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.same_samples import sample_hashes
from shoal.spec.cluster import Cluster
from shoal.spec.job import Job, is_stream
from shoal.spec.plan import Plan
from shoal.spec.record import JobRecord, RunRecord, read_loggers, traced_steps
from shoal.training.host import Say, measured_host, probed_host
from shoal.training.loader import check_loading
from shoal.training.loggers.registry import check_loggers, loggers_of
from shoal.training.predict import predict_plan
from shoal.training.resolve import resolve_plan


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What somebody has asked for beside the job and the plan."""

    file: Path | None
    """The file that holds the job."""
    variable: str = "job"
    runs: Path
    name: str | None = None
    cluster: Path | None = None
    """What predictions go by; without it cluster.toml, or a brief measurement."""
    elsewhere: Cluster | None = None
    """What they go by where the run is not on this host."""
    trace: str = ""
    """The steps to write traces of, as "100:103"."""
    log: str | Iterable[str] | None = None
    """Where its numbers go; None: to those of the run that is gone on with, or to TensorBoard."""

    def __post_init__(self) -> None:
        traced_steps(self.trace)
        if self.log is not None:
            object.__setattr__(self, "log", read_loggers(self.log))
            check_loggers(self.loggers or ())

    @property
    def loggers(self) -> tuple[str, ...] | None:
        """The names in `log`."""
        return None if self.log is None else read_loggers(self.log)


def prepare_run(job: Job, plan: Plan, asked: Asked, *, say: Say, holds: ExitStack | None = None) -> RunFolder:
    """Make the run folder of `job` under `plan`: everything a worker needs to start.

    From the first change of it on the run is held (core/run_lock.py), until `holds` is closed; without that, until this
    returns: whoever trains it later holds it then.
    """
    check_loading(job, plan)
    for note in (notes := (*notes_of(job), *best_notes(job, plan))):
        say(note)
    host = asked.elsewhere or probed_host(asked.cluster, say=say) or measured_host()
    plan, profile = resolve_plan(job, plan, gpu=host.nodes[0].devices > 0, say=say)
    if plan.on_loss.go_on and not plan.goes_on and plan.workers > 1:
        say("DeepSpeed's workers cannot go on without one that is lost: the run would end; --resume goes on with it.")
    plan = dataclasses.replace(plan, predicted=predict_plan(job, plan, profile, cluster=host, say=say))
    before = _before(asked, plan)
    log = loggers_of(before) if asked.loggers is None else asked.loggers
    check_loggers(log)
    with ExitStack() as here:
        folder = _opened(asked, plan, before, here if holds is None else holds)
        told = {"trace": asked.trace, "log": log, "notes": notes}
        write_run(folder, job, plan, host, file=asked.file, variable=asked.variable, **told)
    return folder


def notes_of(job: Job) -> tuple[str, ...]:
    """Return what is lost with the data of `job` as it was given, in sentences."""
    if not is_stream(job.data) or sample_hashes(job.data):
        return job.notes
    return (
        *job.notes,
        "The stream gives other samples each time it is read: with several workers, or after a resume, some are "
        "trained on twice and some not at all. Draw from a generator that is seeded in __iter__, or by set_epoch().",
    )


def best_notes(job: Job, plan: Plan) -> tuple[str, ...]:
    """Return in a sentence which checkpoints can never be the best, where some cannot: nothing evaluates their step."""
    settings, evaluated = plan.checkpoint, job.eval_every_steps
    if not settings.best or job.eval_data is None or (not settings.every_steps and plan.checkpoint_s is None):
        return ()
    both = math.lcm(settings.every_steps, evaluated or 0)
    if both and both == settings.every_steps:
        return ()
    some = f"those of every {both:,} steps, and the last," if 0 < both < job.total_steps else "the last"
    if not settings.every_steps and evaluated:
        some = f"those that fall on one of every {evaluated:,} steps, and the last,"
    instead = f"--checkpoint-every {evaluated}" if evaluated else "Job.eval_every_steps"
    return (
        f"checkpoint.best={settings.best!r}: of the checkpoints only {some} can be the best, for the job is evaluated "
        f"after no other. To have all of them judged: {instead}",
    )


def _before(asked: Asked, plan: Plan) -> RunFolder | None:
    """Return the run that is to be gone on with, if there is one of that name."""
    if not plan.checkpoint.resume or asked.name is None:
        return None
    folder = RunFolder(asked.runs / asked.name)
    return folder if folder.run_toml.is_file() else None


def _opened(asked: Asked, plan: Plan, before: RunFolder | None, holds: ExitStack) -> RunFolder:
    """Return the folder of a new run; or `before`, the one that is to be gone on with, ready for it."""
    if before is None:
        folder = RunFolder.create(asked.runs, asked.name, stem=asked.file.stem if asked.file else "run")
        holds.enter_context(held(folder))
        return folder
    folder = RunFolder.open(before.path)
    holds.enter_context(held(folder))
    there = committed(folder.checkpoints)
    folder.begin_attempt(step=step_of(there[-1]) if there else 0, workers=plan.workers)
    return folder


def latest_run(runs: Path, stem: str) -> str | None:
    """Return the name of the last run of the job file `stem` that can be gone on with.

    It is not done, has a checkpoint, and nobody trains it now.
    """
    found = [path.parent for path in runs.glob("*/run.toml") if path.parent.name.rpartition("-")[0] == stem]
    open_ones = [path for path in found if _can_go_on(RunFolder(path))]
    return max(open_ones, key=lambda path: (path / "run.toml").stat().st_mtime).name if open_ones else None


def _can_go_on(folder: RunFolder) -> bool:
    return folder.read_result()["status"] != "done" and bool(committed(folder.checkpoints)) and not is_held(folder)


def write_run(
    folder: RunFolder,
    job: Job,
    plan: Plan,
    host: Cluster,
    *,
    file: Path | None,
    variable: str = "job",
    **told: Any,
) -> None:
    """Write into a new run folder what its workers read; `told` is what else the JobRecord holds."""
    if file:
        shutil.copyfile(file, folder.code / file.name)
    record = _job_record(job, file, variable)
    write_toml(folder.job_toml, dataclasses.replace(record, **told))
    write_toml(folder.plan_toml, plan)
    write_toml(folder.cluster_toml, host)
    write_toml(folder.run_toml, run_record(folder, plan))  # last: a folder with run.toml is complete


def _job_record(job: Job, file: Path | None, variable: str) -> JobRecord:
    return JobRecord(
        file=str(file.resolve()) if file else "",
        variable=variable,
        num_samples=job.num_samples or 0,
        batch_size=job.batch_size,
        steps=job.total_steps,
        seed=job.seed,
        unit=job.unit,
    )


def run_record(folder: RunFolder, plan: Plan) -> RunRecord:
    """Return the circumstances in which the run in `folder` is started."""
    versions = {
        "shoal": shoal.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    if plan.engine == "deepspeed":
        versions["deepspeed"] = importlib.metadata.version("deepspeed")
    return RunRecord(
        name=folder.name,
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        command=shlex.join(sys.argv),
        host=platform.node(),
        versions=versions,
    )

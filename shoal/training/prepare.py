"""Before a run: hold the plan against the job, predict what it costs, and write the run folder that workers read."""

import dataclasses
import datetime
import platform
import shlex
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

import shoal
from shoal.core.errors import PlanError
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.spec.job import Job
from shoal.spec.parts import parts
from shoal.spec.plan import Plan
from shoal.spec.record import JobRecord, RunRecord
from shoal.training.host import Say, measured_host, probed_host
from shoal.training.predict import predict_plan


def check_plan(plan: Plan, job: Job) -> None:
    """Raise PlanError if `plan` cannot be run, or leaves a worker of `job` without work."""
    _check_supported(plan)
    if plan.workers > len(job.data):
        raise PlanError(f"{plan.workers} workers for {len(job.data)} samples. Use at most {len(job.data)} workers.")
    if plan.workers > job.batch_size:
        raise PlanError(
            f"{plan.workers} workers for a global batch of {job.batch_size} samples. "
            f"Use at most {job.batch_size} workers, or a larger batch_size."
        )
    full_batch = min(job.batch_size, len(job.data))
    for worker, samples in enumerate(parts(full_batch, plan.shares)):
        if samples == 0:
            raise PlanError(
                f"the share {plan.shares[worker]:g} of worker {worker} is less than one sample of a global batch of "
                f"{full_batch}. Give it more, or leave it out."
            )


def _check_supported(plan: Plan) -> None:
    """Raise PlanError for what can be planned and not yet be run."""
    asked = {
        "mesh.pipeline": (plan.mesh.pipeline, 1),
        "mesh.shard": (plan.mesh.shard, 1),
        "mesh.tensor": (plan.mesh.tensor, 1),
        "recompute": (plan.recompute, "none"),
        "sync.mode": (plan.sync.mode, "all-reduce"),
        "sync.codec": (plan.sync.codec, "none"),
    }
    for name, (value, usual) in asked.items():
        if value != usual:
            raise PlanError(
                f"{name}={value!r} can be planned, but not be run yet. Use {name}={usual!r}: so far `shoal train` runs "
                "data parallelism, with mesh.replicate, micro_batch, shares and precision."
            )


def prepare_run(
    job: Job,
    plan: Plan,
    *,
    file: Path | None,
    variable: str = "job",
    runs: Path,
    name: str | None,
    cluster: Path | None = None,
    say: Say,
) -> RunFolder:
    """Make the run folder of `job` under `plan`: everything a worker needs to start.

    What the plan is predicted to cost goes by the file `cluster`, by cluster.toml, or by a brief measurement.
    """
    check_plan(plan, job)
    host = probed_host(cluster, say=say) or measured_host()
    plan = dataclasses.replace(plan, predicted=predict_plan(job, plan, cluster=host, say=say))
    folder = RunFolder.create(runs, name, stem=file.stem if file else "run")
    if file:
        shutil.copyfile(file, folder.code / file.name)
    write_toml(folder.job_toml, _job_record(job, file, variable))
    write_toml(folder.plan_toml, plan)
    write_toml(folder.cluster_toml, host)
    write_toml(folder.run_toml, _run_record(folder))  # last: a folder with run.toml is complete
    return folder


def _job_record(job: Job, file: Path | None, variable: str) -> JobRecord:
    return JobRecord(
        file=str(file.resolve()) if file else "",
        variable=variable,
        num_samples=len(job.data),
        batch_size=job.batch_size,
        steps=job.total_steps,
        seed=job.seed,
        unit=job.unit,
    )


def _run_record(folder: RunFolder) -> RunRecord:
    versions = {
        "shoal": shoal.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
    return RunRecord(
        name=folder.name,
        started=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        command=shlex.join(sys.argv),
        host=platform.node(),
        versions=versions,
    )

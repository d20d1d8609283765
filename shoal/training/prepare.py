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
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.spec.cluster import Cluster
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.spec.record import JobRecord, RunRecord
from shoal.training.host import Say, measured_host, probed_host
from shoal.training.predict import predict_plan
from shoal.training.resolve import resolve_plan


def prepare_run(
    job: Job,
    plan: Plan,
    *,
    file: Path | None,
    variable: str = "job",
    runs: Path,
    name: str | None,
    cluster: Path | None = None,
    elsewhere: Cluster | None = None,
    say: Say,
) -> RunFolder:
    """Make the run folder of `job` under `plan`: everything a worker needs to start.

    What the plan is predicted to cost goes by the file `cluster`, by cluster.toml, or by a brief measurement; of a run
    that is not on this host, by the cluster `elsewhere`.
    """
    host = elsewhere or probed_host(cluster, say=say) or measured_host()
    plan, profile = resolve_plan(job, plan, gpu=host.nodes[0].devices > 0, say=say)
    plan = dataclasses.replace(plan, predicted=predict_plan(job, plan, profile, cluster=host, say=say))
    folder = _gone_on_with(runs, name, plan) or RunFolder.create(runs, name, stem=file.stem if file else "run")
    write_run(folder, job, plan, host, file=file, variable=variable)
    return folder


def _gone_on_with(runs: Path, name: str | None, plan: Plan) -> RunFolder | None:
    """Return the run that is to be gone on with, ready for it; None if this is a new one."""
    if not plan.checkpoint.resume or name is None or not (runs / name / "run.toml").is_file():
        return None
    folder = RunFolder.open(runs / name)
    there = committed(folder.checkpoints)
    folder.begin_attempt(step=step_of(there[-1]) if there else 0, workers=plan.workers)
    return folder


def latest_run(runs: Path, stem: str) -> str | None:
    """Return the name of the last run of the job file `stem` that can be gone on with: not done, with a checkpoint."""
    found = [path.parent for path in runs.glob("*/run.toml") if path.parent.name.rpartition("-")[0] == stem]
    open_ones = [
        path
        for path in found
        if RunFolder(path).read_result()["status"] != "done" and committed(RunFolder(path).checkpoints)
    ]
    return max(open_ones, key=lambda path: (path / "run.toml").stat().st_mtime).name if open_ones else None


def write_run(
    folder: RunFolder,
    job: Job,
    plan: Plan,
    host: Cluster,
    *,
    file: Path | None,
    variable: str = "job",
    is_recorded: bool = False,
) -> None:
    """Write into a new run folder what its workers read."""
    if file:
        shutil.copyfile(file, folder.code / file.name)
    record = _job_record(job, file, variable)
    write_toml(folder.job_toml, dataclasses.replace(record, is_recorded=is_recorded))
    write_toml(folder.plan_toml, plan)
    write_toml(folder.cluster_toml, host)
    write_toml(folder.run_toml, _run_record(folder))  # last: a folder with run.toml is complete


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

"""From a job to a ranking of plans: the job is traced, the cluster looked up, the rest is the planner's arithmetic."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.core.toml import read_toml
from shoal.planner.calibration.calibration import Calibration, calibrated, find_calibration
from shoal.planner.machine import Machine, machine_of
from shoal.planner.search.ranking import Ranking, check_plan, rank_plans
from shoal.planner.search.reliability import NODE_MTBF_S
from shoal.profile.config import job_from_config
from shoal.profile.trace import trace
from shoal.spec.cluster import Cluster
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.spec.profile import Profile
from shoal.training.host import CLUSTER_TOML, Say, measured_host
from shoal.training.jobfile import load_job

_TRACED = 2
"""Samples that a job is traced with: more cost more, and layers that look at the whole batch refuse a single one."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where to train: the cluster, the same with all names looked up, and what was measured on it."""

    cluster: Cluster
    machine: Machine
    calibration: Calibration | None = None


def plan_job(
    job: Job,
    cluster: Cluster | None = None,
    *,
    precision: str = "fp32",
    per_node: int | None = None,
    keep: int = 5,
    allow_lossy: bool = False,
    node_mtbf_s: float = NODE_MTBF_S,
    folder: Path = Path(),
    say: Say = lambda _: None,
) -> Ranking:
    """Return the best plans for `job` on `cluster`, or on this machine; a calibration in `folder` is used.

    `say` is told what is being done.
    """
    place = find_place(cluster, per_node=per_node, folder=folder, say=say)
    profile = profile_job(job, place.machine, precision=precision, say=say)
    say("searching")
    return rank_plans(
        profile,
        place.cluster,
        machine=place.machine,
        calibration=place.calibration,
        batch_size=job.largest_batch,
        keep=keep,
        lossy=allow_lossy,
        node_mtbf_s=node_mtbf_s,
    )


def check_job_plan(
    job: Job,
    plan: Plan,
    cluster: Cluster | None = None,
    *,
    per_node: int | None = None,
    node_mtbf_s: float = NODE_MTBF_S,
    folder: Path = Path(),
    say: Say = lambda _: None,
) -> Ranking:
    """Return what `plan` is predicted to cost for `job`; raise PlanError where it cannot run there."""
    place = find_place(cluster, per_node=per_node, folder=folder, say=say)
    return check_plan(
        plan,
        profile_job(job, place.machine, precision=plan.precision, say=say),
        place.cluster,
        machine=place.machine,
        calibration=place.calibration,
        batch_size=job.batch_size,
        num_samples=job.num_samples or job.batch_size,
        node_mtbf_s=node_mtbf_s,
    )


def read_job(path: Path, *, batch_size: int | None = None, sequence: int | None = None) -> Job:
    """Return the job of a job file, or of a Hugging Face config file (.json)."""
    if path.suffix == ".json":
        size = {"batch_size": batch_size} if batch_size else {}
        return job_from_config(path, sequence=sequence, **size)
    if sequence is not None:
        raise ConfigError(
            f"--sequence {sequence} goes with a config file (.json): the data of {path.name} has its own."
        )
    job = load_job(path)
    return dataclasses.replace(job, batch_size=batch_size) if batch_size else job


def find_place(cluster: Cluster | None, *, per_node: int | None, folder: Path, say: Say) -> Place:
    """Return where to train: `cluster`, or that of cluster.toml in this folder, or this machine, measured now."""
    if cluster is None:
        say("measuring this machine")
        cluster = read_toml(Cluster, CLUSTER_TOML) if CLUSTER_TOML.is_file() else measured_host()
    machine = _machine(cluster, per_node)
    calibration = find_calibration(folder)
    if calibration is None or not calibration.fits(machine):
        return Place(cluster=cluster, machine=machine)
    return Place(cluster=cluster, machine=calibrated(machine, calibration), calibration=calibration)


def _machine(cluster: Cluster, per_node: int | None) -> Machine:
    """Return the machine of `cluster`: on processors, with a worker for each core, and the host's memory."""
    least = min(cluster.nodes, key=lambda node: node.cores)
    if any(node.devices for node in cluster.nodes):
        return machine_of(cluster, per_node=per_node)
    machine = machine_of(cluster, per_node=per_node or max(1, least.cores))
    memory_bytes = machine.device.memory_bytes or min(node.memory_bytes for node in cluster.nodes)
    return dataclasses.replace(machine, device=dataclasses.replace(machine.device, memory_bytes=memory_bytes))


def profile_job(job: Job, machine: Machine, *, precision: str, say: Say) -> Profile:
    """Return what `job` costs, traced with the kernels of the machine's devices."""
    say("tracing the model")
    return trace(job, micro_batch=min(job.batch_size, _TRACED), precision=precision, gpu=not machine.shared)

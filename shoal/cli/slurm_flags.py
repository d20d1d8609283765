"""The flags of `shoal train` that say how a job on a cluster is to be."""

import argparse
import dataclasses
from dataclasses import dataclass
from pathlib import Path

from shoal.cli import flags
from shoal.core.errors import ConfigError
from shoal.core.notice import parse_limit
from shoal.core.units import format_seconds, parse_bytes
from shoal.launch.slurm.site import Site, read_site
from shoal.spec.plan import Plan

TIME_S = 3600
NOTICE_S = 60
_FEWEST_CHECKPOINTS = 8
"""So many in the time of one job, where the plan has none: at most an eighth of it is lost with a node."""
_MOST_BETWEEN_S = 1800.0
_ON_CLUSTER = (
    *("nodes", "per_node", "time", "partition", "account", "gpus_per_worker", "cpus_per_worker", "memory", "site"),
    *("detach", "slurm_option"),
)


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the flags ask of the cluster."""

    site: Site
    nodes: int
    per_node: int
    time_s: int
    notice_s: int
    gpus_per_worker: int
    cpus_per_worker: int
    memory_bytes: int | None
    partition: str | None
    account: str | None
    options: tuple[str, ...]


def add_slurm_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("on a cluster")
    group.add_argument("--slurm", action="store_true", help="train in a job of Slurm, and show how it goes from here")
    group.add_argument("--nodes", type=int, metavar="N", help="on so many nodes (default: 1)")
    group.add_argument("--per-node", type=int, metavar="G", help="with so many workers on each")
    group.add_argument(
        "--time", metavar="TIME", help="the job's time limit (default: 1h); a run that takes longer is requeued"
    )
    group.add_argument("--partition", metavar="P", help="the partition (default: the site's)")
    group.add_argument("--account", metavar="A", help="the account (default: the site's)")
    group.add_argument("--gpus-per-worker", type=int, metavar="N", help="GPUs for each worker (default: the site's)")
    group.add_argument("--cpus-per-worker", type=int, metavar="N", help="cores for each worker (default: the site's)")
    group.add_argument("--memory", metavar="SIZE", help="memory of each node, such as 64GB (default: Slurm's)")
    group.add_argument(
        "--slurm-option", action="append", default=[], metavar="OPTION", help='any other of sbatch: "--qos=high"'
    )
    group.add_argument("--site", type=Path, metavar="TOML", help="what is special about the cluster (docs/cluster.md)")
    group.add_argument("--detach", action="store_true", help="submit, and do not wait; shoal attach RUN shows it")


def set_workers(arguments: argparse.Namespace) -> None:
    """Let --nodes and --per-node say how many workers there are, where nothing else does."""
    flags.only_with_slurm(arguments, _ON_CLUSTER)
    if arguments.slurm and arguments.wall_limit is not None:
        raise ConfigError("--wall-limit is for workers on this machine. With --slurm, give --time.")
    if not arguments.slurm or arguments.plan or arguments.mesh or arguments.shares or arguments.workers is not None:
        return
    if arguments.nodes is not None or arguments.per_node is not None:
        arguments.workers = (arguments.nodes or 1) * (arguments.per_node or 1)


def read_slurm(arguments: argparse.Namespace, plan: Plan) -> Request:
    """Return what the flags ask for, to run `plan`."""
    site = read_site(arguments.site)
    nodes, per_node = layout(plan.workers, arguments.nodes, arguments.per_node)
    time_s = int(flags.read("--time", parse_limit, arguments.time)) if arguments.time else TIME_S
    notice_s = int(flags.read("--notice", parse_limit, arguments.notice)) if arguments.notice else NOTICE_S
    if notice_s >= time_s:
        raise ConfigError(
            f"--time {time_s} s with {notice_s} s of notice leaves no time to train. "
            "Give a longer --time, or a shorter --notice."
        )
    gpus = site.gpus_per_worker if arguments.gpus_per_worker is None else arguments.gpus_per_worker
    return Request(
        site=site,
        nodes=nodes,
        per_node=per_node,
        time_s=time_s,
        notice_s=notice_s,
        gpus_per_worker=gpus,
        cpus_per_worker=arguments.cpus_per_worker or site.cpus_per_worker,
        memory_bytes=int(flags.read("--memory", parse_bytes, arguments.memory)) if arguments.memory else None,
        partition=arguments.partition,
        account=arguments.account,
        options=tuple(arguments.slurm_option),
    )


def layout(workers: int, nodes: int | None, per_node: int | None) -> tuple[int, int]:
    """Return how many nodes there are, and how many workers on each."""
    for flag, given in (("--nodes", nodes), ("--per-node", per_node)):
        if given is not None:
            flags.whole(flag, given)
    asked_nodes = nodes or (-(-workers // per_node) if per_node else 1)
    asked_per_node = per_node or -(-workers // asked_nodes)
    if asked_nodes * asked_per_node != workers:
        fitting = [n for n in range(1, workers + 1) if workers % n == 0]
        raise ConfigError(
            f"--nodes {asked_nodes} with {asked_per_node} workers on each are {asked_nodes * asked_per_node}, and the "
            f"plan has {workers}. Give --nodes {', '.join(map(str, fitting[:6]))}, or another --mesh."
        )
    return asked_nodes, asked_per_node


def with_checkpoints(plan: Plan, time_s: int) -> tuple[Plan, str]:
    """Return `plan` with checkpoints, which a job that is requeued goes on from, and the sentence about it, if any."""
    if plan.checkpoint.every_steps or plan.checkpoint_s is not None:
        return plan, ""
    every_s = max(1.0, min(_MOST_BETWEEN_S, time_s / _FEWEST_CHECKPOINTS))
    said = f"Checkpoints every {format_seconds(every_s)}: a job that is requeued goes on from the last of them. "
    return dataclasses.replace(plan, checkpoint_s=every_s), said + "--checkpoint-every says it in steps."

"""The flags that say how to train, for the verbs that run a plan: each overrides a line of the plan file."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from shoal.cli.plan_file import was_edited
from shoal.comm.rank import read_rank
from shoal.core.errors import PlanError, did_you_mean
from shoal.core.toml import read_toml
from shoal.spec.plan import Loading, Mesh, Plan

_AXES = tuple(axis.name for axis in dataclasses.fields(Mesh))
_FLAGS = (
    "workers mesh zero shares micro_batch engine offload precision recompute schedule chunks compile "
    "loader_threads loader_workers"
)
"""Of argparse's names."""


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("--plan", type=Path, metavar="TOML", help="a plan file; the flags below override it")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="how many worker processes, each with all of the model; with --zero, each with a shard of it",
    )
    parser.add_argument(
        "--mesh", metavar="AXIS=N,...", help="how workers share the work: pipeline, replicate, shard, tensor"
    )
    parser.add_argument(
        "--zero", type=int, metavar="Z", help="what shards spread: 1 optimizer, 2 and gradients, 3 and all"
    )
    parser.add_argument(
        "--shares", metavar="S,S,...", help="each replica's fraction of the global batch (default: equal)"
    )
    parser.add_argument("--micro-batch", type=int, metavar="M", help="samples in one forward; more are accumulated")
    parser.add_argument(
        "--engine", metavar="E", help="torch (default), or deepspeed, which runs ZeRO: --engine deepspeed --zero 2"
    )
    parser.add_argument(
        "--offload", action="store_true", default=None, help="deepspeed: keep the optimizer in the host's memory"
    )
    parser.add_argument("--precision", metavar="P", help="fp32 (default) or bf16")
    parser.add_argument("--recompute", metavar="R", help="compute again instead of keeping: none, selective or full")
    parser.add_argument(
        "--schedule", metavar="S", help="of a pipeline: 1f1b (default), gpipe, interleaved or zero-bubble"
    )
    parser.add_argument("--chunks", type=int, metavar="C", help="pieces of the model a stage holds, with interleaved")
    parser.add_argument(
        "--loader-threads",
        type=int,
        metavar="T",
        help="threads that load batches (default: of a pack by its cores, or 1)",
    )
    parser.add_argument(
        "--loader-workers",
        type=int,
        metavar="W",
        help="processes that load batches instead, for datasets and transforms in Python",
    )
    parser.add_argument("--compile", action="store_true", default=None, help="use torch.compile")


def read_plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan of the plan file, overridden by the flags; without a file, plain data parallelism."""
    plan = read_toml(Plan, arguments.plan) if arguments.plan else Plan()
    shares = _shares(arguments.shares) if arguments.shares is not None else plan.batch.shares
    mesh = _mesh(arguments, plan.mesh, len(shares) if arguments.shares is not None else None)
    if mesh.data != plan.mesh.data and arguments.shares is None:
        shares = ()  # the plan's shares were for another number of replicas
    asked: dict[str, Any] = {
        name: value
        for name in ("engine", "offload", "precision", "recompute", "schedule", "chunks", "compile")
        if (value := getattr(arguments, name)) is not None
    }
    zero = arguments.zero if arguments.zero is not None else plan.zero
    if arguments.zero is None and mesh.shard > 1 and not zero:
        zero = 3  # --mesh shard=4 by itself
    if mesh.shard == 1 and arguments.zero is None and asked.get("engine", plan.engine) == "torch":
        zero = 0
    micro_batch = plan.batch.micro_batch if arguments.micro_batch is None else arguments.micro_batch
    stages = plan.stages if mesh.pipeline == plan.mesh.pipeline else ()
    batch = dataclasses.replace(plan.batch, micro_batch=micro_batch, shares=shares)
    if arguments.loader_threads is not None or arguments.loader_workers is not None:
        asked["loading"] = Loading(threads=arguments.loader_threads or 0, workers=arguments.loader_workers or 0)
    return dataclasses.replace(
        plan, mesh=mesh, batch=batch, zero=zero, stages=stages, why=_why(arguments, plan, mesh), **asked
    )


def _why(arguments: argparse.Namespace, planned: Plan, mesh: Mesh) -> tuple[str, ...]:
    """Return why the plan is this one: what its file says, and what flags made of it."""
    values = {name: getattr(arguments, name) for name in _FLAGS.split()}
    given = " ".join(_flag(name, value) for name, value in values.items() if value is not None)
    if arguments.plan is None:
        alone = "No plan was given, and no number of workers: one worker."
        started = f"No plan was given: plain data parallelism over the {mesh.workers} workers that were started."
        return (f"Given by {given}.",) if given else (started if mesh.workers > 1 else alone,)
    name = arguments.plan.name
    why = planned.why or (f"{name} does not say why.",)
    edited = (f"{name} was edited after `shoal plan` had written it.",) if was_edited(arguments.plan) else ()
    return (*why, *edited, *((f"Changed by {given}.",) if given else ()))


def _flag(name: str, value: object) -> str:
    return f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}")


def _mesh(arguments: argparse.Namespace, planned: Mesh, num_shares: int | None) -> Mesh:
    if arguments.mesh is not None:
        mesh = _read_mesh(arguments.mesh)
        if arguments.workers not in (None, mesh.workers):
            raise PlanError(f"--workers {arguments.workers} beside --mesh {arguments.mesh}, which has {mesh.workers}.")
        return mesh
    workers = arguments.workers if arguments.workers is not None else num_shares or _launched_workers()
    shards = arguments.zero is not None and arguments.zero > 0 and planned.keeps_whole  # --zero 3 --workers 4
    if shards and (workers or planned.workers) > 1:
        return Mesh(shard=workers or planned.workers)
    if workers is None or workers == planned.workers:
        return planned
    if planned.workers == planned.shard > 1:
        return Mesh(shard=workers)
    if not planned.keeps_whole:
        raise PlanError(
            f"{workers} workers for a plan of {planned.workers}. "
            "Give a --mesh with as many, or leave the number to the plan."
        )
    return Mesh(replicate=workers)


def _read_mesh(text: str) -> Mesh:
    sizes = {}
    for item in text.split(","):
        axis, _, size = item.partition("=")
        if axis.strip() not in _AXES:
            raise PlanError(f"--mesh {text!r}: {axis.strip()!r} is no axis.{did_you_mean(axis.strip(), list(_AXES))}")
        if not size.strip().isdigit():
            raise PlanError(f"--mesh {text!r}: write each axis with its size, like shard=2,tensor=2")
        sizes[axis.strip()] = int(size)
    return Mesh(**sizes)


def _launched_workers() -> int | None:
    rank = read_rank()
    return rank.workers if rank else None


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(item) for item in text.split(","))
    except ValueError:
        raise PlanError(f"--shares {text!r} is not a list of numbers. Write them like .25,.25,.10,.4") from None

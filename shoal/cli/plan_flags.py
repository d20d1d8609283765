"""The flags that say how to train, for the verbs that run a plan: each overrides a line of the plan file."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from shoal.comm.rank import read_rank
from shoal.core.errors import PlanError, did_you_mean
from shoal.core.toml import read_toml
from shoal.spec.plan import Mesh, Plan

_AXES = tuple(axis.name for axis in dataclasses.fields(Mesh))


def add_plan_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument("--plan", type=Path, metavar="TOML", help="a plan file; the flags below override it")
    parser.add_argument(
        "--workers", type=int, metavar="N", help="how many worker processes, each with all of the model"
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
    parser.add_argument("--precision", metavar="P", help="fp32 (default) or bf16")
    parser.add_argument("--recompute", metavar="R", help="compute again instead of keeping: none, selective or full")
    parser.add_argument(
        "--schedule", metavar="S", help="of a pipeline: 1f1b (default), gpipe, interleaved or zero-bubble"
    )
    parser.add_argument("--chunks", type=int, metavar="C", help="pieces of the model a stage holds, with interleaved")
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
        for name in ("precision", "recompute", "schedule", "chunks", "compile")
        if (value := getattr(arguments, name)) is not None
    }
    zero = arguments.zero if arguments.zero is not None else plan.zero
    if arguments.zero is None and mesh.shard > 1 and not zero:
        zero = 3  # --mesh shard=4 by itself
    if mesh.shard == 1 and arguments.zero is None:
        zero = 0
    micro_batch = plan.batch.micro_batch if arguments.micro_batch is None else arguments.micro_batch
    stages = plan.stages if mesh.pipeline == plan.mesh.pipeline else ()
    batch = dataclasses.replace(plan.batch, micro_batch=micro_batch, shares=shares)
    return dataclasses.replace(plan, mesh=mesh, batch=batch, zero=zero, stages=stages, **asked)


def _mesh(arguments: argparse.Namespace, planned: Mesh, num_shares: int | None) -> Mesh:
    if arguments.mesh is not None:
        mesh = _read_mesh(arguments.mesh)
        if arguments.workers not in (None, mesh.workers):
            raise PlanError(f"--workers {arguments.workers} beside --mesh {arguments.mesh}, which has {mesh.workers}.")
        return mesh
    workers = arguments.workers if arguments.workers is not None else num_shares or _launched_workers()
    if workers is None or workers == planned.workers:
        return planned
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

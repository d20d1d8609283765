"""`shoal train`: run a job under a plan."""

import argparse
import dataclasses
import json
from pathlib import Path

from shoal.comm.rank import read_rank
from shoal.core.errors import ConfigError, PlanError
from shoal.core.toml import read_toml
from shoal.spec.plan import Batch, Mesh, Plan

ABOUT = "Train the job of a file, on this machine, with any number of workers."
EXAMPLE = """\
example:
  shoal train train.py --workers 2
  shoal train train.py --workers 4 --shares .25,.25,.10,.4 --micro-batch 8 --precision bf16
  shoal train train.py --plan plan.toml --steps 100 --json
  torchrun --nproc-per-node 4 -m shoal train train.py       the same under torchrun; srun likewise

FILE defines `job = shoal.Job(...)`. Its main is not run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the Python file that defines `job`")
    parser.add_argument("--plan", type=Path, metavar="TOML", help="a plan file; the flags below override it")
    parser.add_argument("--workers", type=int, metavar="N", help="how many worker processes (default: 1)")
    parser.add_argument(
        "--shares", metavar="S,S,...", help="each worker's fraction of the global batch (default: equal)"
    )
    parser.add_argument("--micro-batch", type=int, metavar="M", help="samples in one forward; more are accumulated")
    parser.add_argument("--precision", metavar="P", help="fp32 (default) or bf16")
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="TOML",
        help="what `shoal probe` measured (default: cluster.toml, if it is here)",
    )
    parser.add_argument("--steps", type=int, metavar="S", help="train for S steps instead of the job's own length")
    parser.add_argument("--name", metavar="RUN", help="the run's name (default: the file's, numbered)")
    parser.add_argument("--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go")


def run(arguments: argparse.Namespace) -> int:
    """Train, and show the summary."""
    plan = _plan(arguments)
    file: Path = arguments.file
    if not file.is_file():
        raise ConfigError(f"there is no file {file}.")
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: train for at least 1 step.")
    if arguments.cluster is not None and not arguments.cluster.is_file():
        raise ConfigError(f"there is no file {arguments.cluster}. Measure this machine: shoal probe")
    from rich.console import Console

    console = Console(stderr=True)
    if not _is_echo():
        console.print(f"{file.name}: tracing the model ...", highlight=False, markup=False)
    from shoal.api import train_file  # imports torch: only once all that can be checked without it is right

    summary = train_file(
        file,
        plan,
        steps=arguments.steps,
        name=arguments.name,
        runs=arguments.runs,
        cluster=arguments.cluster,
        console=console,
    )
    if _is_echo():
        return 0
    if arguments.json:
        print(json.dumps(summary.as_json(), allow_nan=False))
    else:
        from shoal.report.table import render

        Console().print(render(summary))
    return 0


def _plan(arguments: argparse.Namespace) -> Plan:
    """Return the plan of the plan file, overridden by the flags; without a file, plain data parallelism."""
    plan = read_toml(Plan, arguments.plan) if arguments.plan else Plan()
    shares = _shares(arguments.shares) if arguments.shares is not None else plan.batch.shares
    workers = arguments.workers
    if workers is None:
        workers = len(shares) if arguments.shares is not None else _launched_workers() or plan.workers
    elif workers != plan.workers and arguments.shares is None:
        shares = ()  # the plan's shares were for another number of workers
    return dataclasses.replace(
        plan,
        mesh=Mesh(replicate=workers),
        batch=Batch(micro_batch=_first_given(arguments.micro_batch, plan.batch.micro_batch), shares=shares),
        precision=arguments.precision or plan.precision,
    )


def _first_given(flag: int | None, planned: int | None) -> int | None:
    return planned if flag is None else flag


def _launched_workers() -> int | None:
    rank = read_rank()
    return rank.workers if rank else None


def _is_echo() -> bool:
    """Return whether this is a worker of torchrun or srun that is not the first: the first speaks for all."""
    rank = read_rank()
    return rank is not None and rank.index > 0


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(item) for item in text.split(","))
    except ValueError:
        raise PlanError(f"--shares {text!r} is not a list of numbers. Write them like .25,.25,.10,.4") from None

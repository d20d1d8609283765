"""`shoal train`: run a job under a plan."""

import argparse
import dataclasses
import json
import os
import shlex
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import flags
from shoal.cli.checkpoint_flags import add_checkpoint_flags, find_run, read_checkpoints
from shoal.cli.elastic_flags import add_elastic_flags, read_elastic
from shoal.cli.plan_flags import add_plan_flags, read_plan
from shoal.cli.preempt_flags import add_preempt_flags, read_preempt
from shoal.cli.slurm_flags import add_slurm_flags, read_slurm, set_workers
from shoal.cli.sync_flags import add_sync_flags, asks_for_local_steps, read_sync
from shoal.comm.rank import read_rank
from shoal.core.errors import ConfigError
from shoal.launch.starting import getting_ready
from shoal.spec.plan import Plan
from shoal.spec.record import read_loggers, traced_steps
from shoal.training.loggers.registry import check_loggers

if TYPE_CHECKING:
    from rich.console import Console

ABOUT = "Train the job of a file, on this machine or in a job of Slurm, with any number of workers."
EXAMPLE = """\
example:
  shoal train train.py --workers 2
  shoal train train.py --workers 4 --shares .25,.25,.10,.4 --micro-batch 8 --precision bf16
  shoal train train.py --mesh shard=2,tensor=2 --zero 3
  shoal train train.py --engine deepspeed --zero 3 --workers 4 --offload          ZeRO by DeepSpeed
  shoal train train.py --plan plan.toml --steps 100 --json
  shoal train train.py --workers 8 --stage /local/me        with a copy of its pack there, for as long as it runs
  shoal train train.py --workers 8 --checkpoint-every 500   a checkpoint after every 500 steps
  shoal train train.py --workers 4 --resume runs/train-1    go on from its last one, with any number of workers
  shoal train train.py --workers 4 --trace 100:103          what each worker does in these steps, for Perfetto
  shoal train train.py --workers 8 --wall-limit 3h59m       stop with a checkpoint, and exit code 75, before that
  shoal train train.py --workers 4 --sync local --local-steps auto --outer nesterov       over a slow link
  shoal train train.py --workers 4 --sync deadline          without waiting for whoever is much slower
  shoal train train.py --slurm --nodes 4 --per-node 8 --time 4h      on a cluster, from its login node
  shoal train train.py --log tensorboard,wandb,mlflow       its curves, settings and files there as well
  torchrun --nproc-per-node 4 -m shoal train train.py       the same under torchrun; srun likewise

FILE defines `job = shoal.Job(...)`; or a shoal.Program, whose workers call each other. Its main is not run.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the Python file that defines `job`")
    add_plan_flags(parser)
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="TOML",
        help="what `shoal probe` measured (default: cluster.toml, if it is here)",
    )
    parser.add_argument(
        "--stage",
        metavar="WHERE",
        help="where packs are copied to, one copy a node, until the run ends: a folder; memory, local, scratch or "
        "project; off; auto (default): to faster storage of the node, if they lie on shared storage",
    )
    parser.add_argument("--steps", type=int, metavar="S", help="train for S steps instead of the job's own length")
    parser.add_argument(
        "--trace",
        default="",
        metavar="A:B",
        help="write what each worker does in steps A to B, moment by moment, into the run's traces/, for Perfetto; "
        "steps that take 3 times as long as others are written anyway",
    )
    parser.add_argument(
        "--log",
        metavar="LOGGERS",
        help="where its numbers go beside the run folder: tensorboard (default), wandb, mlflow, several as in "
        "tensorboard,wandb, or none; a run that is gone on with keeps its own",
    )
    add_checkpoint_flags(parser)
    add_preempt_flags(parser)
    add_elastic_flags(parser)
    add_sync_flags(parser)
    add_slurm_flags(parser)
    parser.add_argument("--name", metavar="NAME", help="the run's name (default: the file's, numbered)")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go (default: runs)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Train, and show the summary."""
    set_workers(arguments)
    plan = read_plan(arguments)
    if arguments.stage is not None:
        plan = dataclasses.replace(plan, staging=_where(arguments.stage))
    plan = read_sync(arguments, read_elastic(arguments, read_checkpoints(arguments, plan)))
    read_preempt(arguments)
    file: Path = arguments.file
    flags.existing(file)
    if arguments.steps is not None and arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: train for at least 1 step.")
    traced_steps(arguments.trace)
    log = None if arguments.log is None else read_loggers(arguments.log)
    check_loggers(log or ())
    if arguments.cluster is not None and not arguments.cluster.is_file():
        raise ConfigError(f"there is no file {arguments.cluster}. Measure this machine: shoal probe")
    runs, name = find_run(arguments)
    from rich.console import Console

    console = Console(stderr=True)
    if not _is_echo():
        console.print(f"{file.name}: getting ready ...", highlight=False, markup=False)
    if arguments.slurm:
        return _train_on_slurm(arguments, plan, runs=runs, name=name, console=console)
    with getting_ready(plan.workers) if read_rank() is None else nullcontext():
        from shoal.api import train_file  # imports torch: only once all that can be checked without it is right

        if asks_for_local_steps(arguments) and not _is_echo():
            plan = _with_local_steps(arguments, plan, console.print)
        summary = train_file(
            file,
            plan,
            steps=arguments.steps,
            name=name,
            runs=runs,
            cluster=arguments.cluster,
            trace=arguments.trace,
            log=log,
            console=console,
        )
    if _is_echo():
        return 0
    if arguments.json:
        print(json.dumps(summary.as_json(), allow_nan=False))
    else:
        from shoal.report.table import render

        Console().print(render(summary), crop=False)
    return 0


def _train_on_slurm(
    arguments: argparse.Namespace, plan: Plan, *, runs: Path, name: str | None, console: "Console"
) -> int:
    from shoal.cli.slurm_train import follow_run, show_result, submit_training

    request = read_slurm(arguments, plan)
    folder = submit_training(
        arguments.file,
        plan,
        request,
        steps=arguments.steps,
        name=name,
        runs=runs,
        cluster=arguments.cluster,
        trace=arguments.trace,
        log=arguments.log,
        say=lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True),
    )
    if arguments.detach:
        print(
            json.dumps({"run": str(folder.path)}) if arguments.json else f"shoal attach {shlex.quote(str(folder.path))}"
        )
        return 0
    follow_run(folder, console, is_new=True)
    show_result(folder, as_json=arguments.json)
    return 0


def _with_local_steps(arguments: argparse.Namespace, plan: Plan, say: Callable[[str], object]) -> Plan:
    from shoal.launch.nursery import await_early
    from shoal.training.jobfile import load_job
    from shoal.training.local_steps import with_local_steps

    await_early()  # before the speed of this machine is measured
    return with_local_steps(load_job(arguments.file), plan, cluster=arguments.cluster, say=say)


def _where(stage: str) -> str:
    """Return where to stage; a folder whole, as workers may stand in another one."""
    return str(Path(stage).resolve()) if os.sep in stage else stage


def _is_echo() -> bool:
    """Return whether this is a worker of torchrun or srun that is not the first: the first speaks for all."""
    rank = read_rank()
    return rank is not None and rank.index > 0

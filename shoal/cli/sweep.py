"""`shoal sweep`: hyperparameter search, each trial a task or a whole training run."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import flags
from shoal.cli.stopping import stopped_in_order
from shoal.core.host import usable_cores
from shoal.core.notice import parse_limit
from shoal.core.units import parse_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.tasks.submitting import SlurmOptions
    from shoal.tasks.sweep import Sweep
    from shoal.tasks.sweep_result import SweepResult

ABOUT = "Search the hyperparameters with which a function or a training run is best, many trials at once."
EXAMPLE = """\
example:
  shoal sweep tune.py --trials 200                     minimize what objective(trial) in tune.py returns
  shoal sweep tune.py --trials 300                     started again: it goes on until 300 are done
  shoal sweep tune.py --trials 50 --sampler cmaes --pruner hyperband --seed 1 --at-once 1
  shoal sweep examples/sweep.py --trials 20 --maximize --metric accuracy --workers 2     20 training runs
  shoal sweep tune.py --trials 2000 --slurm --cores 2 --at-once 64                      in a few jobs of a cluster

FILE defines `def objective(trial)`, which returns a number, or `def job(trial)`, which returns a shoal.Job; both take
their parameters from trial.suggest_float, suggest_int and suggest_categorical, as Optuna describes them.
"""


_ON_CLUSTER = ("time", "cores", "memory", "gpus", "partition", "account", "site")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the Python file with objective(trial) or job(trial)")
    parser.add_argument("--trials", type=int, required=True, metavar="N", help="how many are to be done in all")
    parser.add_argument(
        "--at-once", type=int, metavar="N", help="how many run at once (default: a core each; training runs: 1)"
    )
    parser.add_argument(
        "--sampler", default="tpe", metavar="S", help="what to try next: tpe (default), random, grid, cmaes"
    )
    parser.add_argument(
        "--pruner", default="median", metavar="P", help="what to give up early: median (default), hyperband, none"
    )
    parser.add_argument("--maximize", action="store_true", help="the highest value is the best, not the lowest")
    parser.add_argument("--seed", type=int, metavar="S", help="with --at-once 1, the same trials again")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="the sweep's folder (default: runs/FILE-sweep); if it has one, go on"
    )
    runs = parser.add_argument_group("trials that are training runs")
    runs.add_argument("--metric", default="loss", metavar="NAME", help="of the evaluation (default: loss)")
    runs.add_argument("--workers", type=int, metavar="N", help="how many worker processes each has")
    runs.add_argument("--plan", type=Path, metavar="TOML", help="the plan of each")
    runs.add_argument("--steps", type=int, metavar="S", help="train for S steps instead of the job's own length")
    cluster = parser.add_argument_group("on a cluster")
    cluster.add_argument("--slurm", action="store_true", help="in a few jobs of a Slurm cluster")
    cluster.add_argument("--time", metavar="TIME", help="time limit of a job, as 30m (default: by what trials take)")
    cluster.add_argument("--cores", type=int, metavar="N", help="cores a trial (default: 1, or one a worker)")
    cluster.add_argument("--memory", metavar="SIZE", help="memory a trial, such as 2GB")
    cluster.add_argument("--gpus", type=int, metavar="N", help="GPUs a job, dealt out to its trials")
    cluster.add_argument("--partition", metavar="P", help="the partition (default: the site's)")
    cluster.add_argument("--account", metavar="A", help="the account (default: the site's)")
    cluster.add_argument(
        "--site", type=Path, metavar="TOML", help="what is special about the cluster (docs/cluster.md)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Search, and show the best."""
    flags.existing(arguments.file)
    sweep = read_sweep(arguments)
    slurm = _slurm(arguments) if arguments.slurm else None
    from rich.console import Console

    from shoal.cli.sweep_table import render
    from shoal.data.stage.lifetime import copied_out
    from shoal.report.page.sweep import write_sweep_page

    console = Console(stderr=True)
    with (
        stopped_in_order(f"{sweep.folder} has what is done. The same command goes on from there."),
        copied_out(sweep.folder, say=lambda line: console.print(line, markup=False, soft_wrap=True)) as kept,
    ):
        result = _search(sweep, console) if slurm is None else _search_on_slurm(sweep, slurm, arguments.at_once)
        write_sweep_page(sweep.folder)
    page = kept / "report.html"
    if arguments.json:
        print(json.dumps(result.as_json() | {"folder": str(kept), "page": str(page)}, allow_nan=False))
    else:
        Console().print(render(result, page))
    return 0


def _search(sweep: "Sweep", console: "Console") -> "SweepResult":
    from shoal.cli.sweep_table import Progress
    from shoal.tasks.executor import Executor
    from shoal.tasks.sweep import run_sweep

    with Progress(sweep.trials, console=console) as progress:
        return run_sweep(sweep, lambda: Executor(sweep.at_once), watch=progress.show)


def _search_on_slurm(sweep: "Sweep", options: "SlurmOptions", at_once: int | None) -> "SweepResult":
    from shoal.tasks.sweep_slurm import run_sweep_on_slurm

    return run_sweep_on_slurm(sweep, options, at_once=at_once, progress=True)


def _slurm(arguments: argparse.Namespace) -> "SlurmOptions":
    from shoal.tasks.bunch import Room
    from shoal.tasks.submitting import SlurmOptions

    cores = arguments.cores if arguments.cores is not None else arguments.workers or 1
    memory = 0.0 if arguments.memory is None else flags.read("--memory", parse_bytes, arguments.memory)
    return SlurmOptions(
        time_s=None if arguments.time is None else int(flags.read("--time", parse_limit, arguments.time)),
        partition=arguments.partition,
        account=arguments.account,
        task=Room(flags.whole("--cores", cores), memory),
        gpus_per_job=arguments.gpus or 0,
        site=arguments.site,
    )


def read_sweep(arguments: argparse.Namespace) -> "Sweep":
    """Return the sweep that the flags say."""
    from shoal.tasks.sweep import Sweep
    from shoal.tasks.sweep_study import Search

    file: Path = arguments.file
    search = Search(
        sampler=arguments.sampler, pruner=arguments.pruner, is_maximized=arguments.maximize, seed=arguments.seed
    )
    if arguments.plan is not None:
        flags.existing(arguments.plan)
    flags.only_with_slurm(arguments, _ON_CLUSTER)
    given = {"--workers": arguments.workers, "--plan": arguments.plan, "--steps": arguments.steps}
    for flag in ("--workers", "--steps"):
        if given[flag] is not None:
            flags.whole(flag, given[flag])
    train_flags = [word for flag, value in given.items() if value is not None for word in (flag, _absolute(value))]
    return Sweep(
        file=file,
        folder=arguments.folder or Path("runs", f"{file.stem}-sweep"),
        trials=arguments.trials,
        at_once=arguments.at_once if arguments.at_once is not None else (1 if trains(file) else usable_cores()),
        search=search,
        metric=arguments.metric,
        train_flags=tuple(train_flags),
    )


def trains(file: Path) -> bool:
    """Return whether the trials of `file` are training runs, without running it: whether it has `def job`."""
    import ast

    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):
        return False  # the first trial says what is wrong with it
    return any(isinstance(node, ast.FunctionDef) and node.name == "job" for node in tree.body)


def _absolute(value: object) -> str:
    return str(value.resolve()) if isinstance(value, Path) else str(value)

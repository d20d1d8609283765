"""`shoal plan`: the best plans for a job on a cluster, what each costs, and why the others lost."""

import argparse
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import flags
from shoal.cli.cluster_flags import add_cluster_arguments, cluster_folder, find_cluster
from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.toml import read_toml
from shoal.core.units import format_seconds, parse_seconds
from shoal.planner.search.reliability import NODE_MTBF_S
from shoal.spec.plan import PRECISIONS, Plan

if TYPE_CHECKING:
    from shoal.planner.search.ranking import Ranking
    from shoal.spec.job import Job

ABOUT = "Find the best plans for a job on a cluster, with their predicted cost, and write plan.toml."
EXAMPLE = """\
example:
  shoal plan train.py                                   for this machine, or for what cluster.toml describes
  shoal plan train.py --nodes 16 --per-node 8 --device H100 --link ib-ndr --adapters 8 --precision bf16
  shoal plan config.json --cluster big.toml --batch-size 1536       the config of a Hugging Face model
  shoal plan train.py --check plan.toml                 whether an edited plan can run, and what it costs
  shoal plan train.py --cluster big.toml --timeline     also what the stages of the pipeline do, and when
  shoal plan --calibrate measured.csv --test others.csv             fit the predictions to measured steps

Only plans that train exactly the same model are proposed; --allow-lossy adds those that do not.
"""

_PLANS = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument(
        "file", type=Path, nargs="?", metavar="FILE", help="a job file, or a Hugging Face config (.json)"
    )
    add_cluster_arguments(parser)
    job = parser.add_argument_group("how to train")
    job.add_argument("--precision", metavar="P", help="fp32 (default) or bf16")
    job.add_argument("--batch-size", type=int, metavar="B", help="the global batch, instead of the job's own")
    job.add_argument("--sequence", type=int, metavar="S", help="tokens in a sample, for a config file")
    job.add_argument("--allow-lossy", action="store_true", help="also plans that do not train exactly the same model")
    job.add_argument("--mtbf", metavar="T", help="mean time between failures of a node (default: 264d, as of Llama 3)")
    out = parser.add_argument_group("what to write")
    out.add_argument(
        "--out", type=Path, default=Path("plan.toml"), metavar="TOML", help="the file (default: plan.toml)"
    )
    out.add_argument(
        "--pick", type=int, default=1, metavar="K", help="write plan K of the table (default: 1, the best)"
    )
    out.add_argument("--force", action="store_true", help="overwrite a plan file that was edited")
    out.add_argument("--check", type=Path, metavar="TOML", help="check this plan instead of searching for one")
    out.add_argument("--timeline", action="store_true", help="draw what the stages of the plan's pipeline do")
    fit = parser.add_argument_group("how good the predictions are")
    fit.add_argument(
        "--calibrate", type=Path, nargs="+", metavar="CSV", help="fit to measured steps: CSVs or run folders"
    )
    fit.add_argument(
        "--test", type=Path, nargs="+", metavar="CSV", help="with --calibrate: also say the error on these"
    )


def run(arguments: argparse.Namespace) -> int:
    """Plan, check or calibrate, and show what came of it."""
    if arguments.calibrate is not None:
        from shoal.cli.plan_calibrate import run_calibrate

        return run_calibrate(arguments)
    _refuse(arguments)
    return _check(arguments) if arguments.check else _plan(arguments)


def _refuse(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for what can be seen to be wrong before anything is imported."""
    if arguments.test is not None:
        raise ConfigError("--test goes with --calibrate: write --calibrate TRAIN.csv --test TEST.csv.")
    if arguments.file is None:
        raise ConfigError("say which job to plan: shoal plan train.py (or --calibrate CSV, which needs no job).")
    flags.existing(arguments.file)
    for name in ("batch_size", "sequence"):
        if getattr(arguments, name) is not None:
            flags.whole(f"--{name.replace('_', '-')}", getattr(arguments, name))
    if arguments.precision not in (None, *PRECISIONS):
        hint = did_you_mean(arguments.precision, list(PRECISIONS))
        raise ConfigError(f"--precision {arguments.precision!r} is none.{hint}")
    if not arguments.out.parent.is_dir():
        raise ConfigError(f"--out {arguments.out}: there is no folder {arguments.out.parent}.")
    if not 1 <= arguments.pick <= _PLANS:
        raise ConfigError(f"--pick {arguments.pick}: the table has the plans 1 to {_PLANS}.")


def _plan(arguments: argparse.Namespace) -> int:
    cluster, node_mtbf_s = find_cluster(arguments), _mtbf_s(arguments)
    with _status(arguments) as say:
        from shoal.training.planning import plan_job

        begin_s = time.perf_counter()
        ranking = plan_job(
            _job(arguments),
            cluster,
            precision=arguments.precision or "fp32",
            per_node=arguments.per_node,
            keep=_PLANS,
            allow_lossy=arguments.allow_lossy,
            node_mtbf_s=node_mtbf_s,
            folder=cluster_folder(arguments),
            say=say,
        )
        took_s = time.perf_counter() - begin_s
    if arguments.pick > len(ranking.plans):
        raise ConfigError(f"--pick {arguments.pick}: there are only {len(ranking.plans)} plans.")
    from shoal.cli.plan_file import write_plan

    plan = ranking.plans[arguments.pick - 1].plan
    written = write_plan(arguments.out, plan, force=arguments.force)
    title = f"{arguments.file.name}, {_where(ranking)}: {ranking.looked_at:,} plans looked at, {format_seconds(took_s)}"
    _show(arguments, ranking, title, picked=plan, written=written)
    return 0


def _check(arguments: argparse.Namespace) -> int:
    plan, cluster = read_toml(Plan, arguments.check), find_cluster(arguments)
    node_mtbf_s = _mtbf_s(arguments)
    if arguments.precision is not None and arguments.precision != plan.precision:
        raise ConfigError(
            f"--precision {arguments.precision}: {arguments.check.name} says precision = {plan.precision!r}. "
            "Change it there."
        )
    with _status(arguments) as say:
        from shoal.training.planning import check_job_plan

        ranking = check_job_plan(
            _job(arguments),
            plan,
            cluster,
            per_node=arguments.per_node,
            node_mtbf_s=node_mtbf_s,
            folder=cluster_folder(arguments),
            say=say,
        )
    _show(arguments, ranking, f"{arguments.check.name} can run, {_where(ranking)}", picked=plan, written=None)
    return 0


def _job(arguments: argparse.Namespace) -> "Job":
    from shoal.training.planning import read_job

    return read_job(arguments.file, batch_size=arguments.batch_size, sequence=arguments.sequence)


def _mtbf_s(arguments: argparse.Namespace) -> float:
    if arguments.mtbf is None:
        return NODE_MTBF_S
    return flags.above_0("--mtbf", flags.read("--mtbf", parse_seconds, arguments.mtbf))


def _where(ranking: "Ranking") -> str:
    machine = ranking.machine
    what = machine.device.title or "workers"
    on = f"{machine.nodes:,} x {machine.per_node} {what}" if machine.nodes > 1 else f"{machine.per_node} x {what}"
    return f"{on}, batch {ranking.batch_size:,}, {ranking.profile.precision}"


@contextmanager
def _status(arguments: argparse.Namespace) -> Iterator[Callable[[str], object]]:
    """Show what is being done as a line on stderr, which goes away afterwards."""
    from rich.console import Console

    with Console(stderr=True).status(f"{arguments.file.name}: starting") as status:
        yield lambda what: status.update(f"{arguments.file.name}: {what}")


def _show(arguments: argparse.Namespace, ranking: "Ranking", title: str, *, picked: Plan, written: bool | None) -> None:
    """Print the ranking, where the plan went, and its timeline; `written`: None where none was to be."""
    if arguments.json:
        where = str(arguments.out) if written else None
        print(json.dumps(ranking.as_json() | {"picked": arguments.pick, "written": where}, allow_nan=False))
        return
    from rich.console import Console

    from shoal.cli.plan_table import render

    console = Console()
    console.print(render(ranking, title=title))
    if arguments.timeline:
        console.print(_timeline(ranking, picked, width=console.width), highlight=False, markup=False)
    if written:
        console.print(f"Plan {arguments.pick} is in {arguments.out}.", highlight=False, markup=False)
    elif written is False:
        print_line = f"{arguments.out} was edited, and is left as it is. --force overwrites it; --out writes another."
        console.print(print_line, highlight=False, markup=False)


def _timeline(ranking: "Ranking", plan: Plan, *, width: int) -> str:
    from shoal.cli.timeline import draw
    from shoal.planner.time.refine import timeline_of

    if plan.mesh.pipeline == 1:
        return "This plan has no pipeline to draw."
    timeline = timeline_of(ranking.profile, plan, ranking.machine, batch_size=ranking.batch_size)
    return draw(timeline, width=width)

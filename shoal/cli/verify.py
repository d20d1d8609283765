"""`shoal verify`: prove that a plan trains the same model as one process does."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import flags
from shoal.cli.plan_flags import add_plan_flags, read_plan
from shoal.core.errors import ConfigError
from shoal.launch.starting import getting_ready

if TYPE_CHECKING:
    from shoal.training.verify import Verdict

ABOUT = "Train a few steps in one process and under a plan, and compare losses, gradients and parameters."
EXAMPLE = """\
example:
  shoal verify train.py --plan plan.toml
  shoal verify train.py --mesh pipeline=2,tensor=2 --micro-batch 4 --steps 20
  shoal verify train.py --engine deepspeed --zero 2 --workers 2

Exits with 0 if they are equal, with 1 if they are not: it shows the first step and parameter that differ.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="the Python file that defines `job`")
    add_plan_flags(parser)
    parser.add_argument("--steps", type=int, default=20, metavar="S", help="how many steps to compare (default: 20)")
    parser.add_argument(
        "--tolerance", type=float, default=1e-4, metavar="T", help="the largest relative difference (default: 1e-4)"
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="DIR", help="where run folders go (default: runs)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Compare, and show the verdict."""
    plan = read_plan(arguments)
    file: Path = arguments.file
    flags.existing(file)
    if arguments.steps < 1:
        raise ConfigError(f"--steps {arguments.steps}: compare at least 1 step.")
    if not arguments.tolerance > 0:
        raise ConfigError(f"--tolerance {arguments.tolerance:g}: it must be more than 0.")
    from rich.console import Console

    with getting_ready(workers=1):  # the first run is that of one process
        from shoal.api import verify_file  # imports torch

        verdict = verify_file(
            file,
            plan,
            steps=arguments.steps,
            tolerance=arguments.tolerance,
            name=None,
            runs=arguments.runs,
            console=Console(stderr=True),
        )
    if arguments.json:
        print(json.dumps(verdict.as_json()))
    else:
        for line in describe(verdict):
            Console().print(line, highlight=False, markup=False)
    return 0 if verdict.equal else 1


def describe(verdict: "Verdict") -> list[str]:
    """Return the verdict in words."""
    lines = [
        f"Over {verdict.steps} steps, the largest relative difference (allowed: {verdict.tolerance:g}):",
        f"  loss             {verdict.loss:.1e}",
        f"  gradient norm    {verdict.gradient_norm:.1e}",
        f"  final parameter  {verdict.parameter:.1e}  ({verdict.parameter_name})",
    ]
    if verdict.left_out:
        lines.append(
            f"  {verdict.left_out:,} of {verdict.numbers:,} numbers are left out: their gradient is only rounding."
        )
    if verdict.first is None:
        return [*lines, "Equal: the plan trains the same model as one process."]
    first = verdict.first
    return [
        *lines,
        f"DIFFERENT, first at step {first.step}: {first.what} is {first.one:.9g} in one process and {first.plan:.9g} "
        f"under the plan, {first.relative:.1e} apart.",
        *_rounding(verdict),
        f"The runs: {verdict.one_run}, {verdict.plan_run}",
    ]


def _rounding(verdict: "Verdict") -> list[str]:
    """Return what one process did whose weights began one rounding apart."""
    if verdict.rounding is None:
        return []
    apart = f"One process whose weights begin one rounding beside the first's is {verdict.rounding:.1e} apart from it"
    if verdict.rounding <= verdict.tolerance:
        return [f"{apart}: this is more than rounding."]
    return [
        f"{apart}, too: this training enlarges rounding, and comparing cannot tell whether the plan is right. Try "
        "fewer --steps, or a lower learning rate."
    ]

"""`shoal bench`: shoal measured beside its peers."""

import argparse
import json
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.units import format_seconds

ABOUT = "Measure shoal beside its peers, in one run."
EXAMPLE = """\
example:
  shoal bench step examples/gpt.py              a step through shoal beside a bare PyTorch loop and beside bare DDP
  shoal bench step examples/gpt.py --workers 4 --rounds 40
  shoal bench start runs/gpt-1                  how long the instant verbs take
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("what", choices=["step", "start"], metavar="WHAT", help="step, or start")
    parser.add_argument("path", type=Path, metavar="PATH", help="a job file (step), or a run folder (start)")
    parser.add_argument("--workers", default="1,2", metavar="N,N", help="step: the numbers of workers (default: 1,2)")
    parser.add_argument("--rounds", type=int, default=61, help="step: how often the two sides take turns (default: 61)")
    parser.add_argument("--steps", type=int, default=1, help="step: how many steps a turn (default: 1)")


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark and show its figures."""
    if not arguments.path.exists():
        raise ConfigError(f"there is no {arguments.path}.")
    figures = _step(arguments) if arguments.what == "step" else _start(arguments)
    if arguments.json:
        print(json.dumps(figures))
    return 0


def _step(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    from shoal.bench.step import bench_step

    figures = []
    for workers in (int(number) for number in arguments.workers.split(",")):
        figure = bench_step(arguments.path, workers=workers, rounds=arguments.rounds, steps=arguments.steps)
        figures.append(figure)
        if not arguments.json:
            print(_in_words(figure), flush=True)
    return figures


def _in_words(figure: dict[str, Any]) -> str:
    return (
        f"{figure['job']}, {figure['workers']} worker{'s' if figure['workers'] > 1 else ''}: "
        f"{figure['peer']} {format_seconds(figure['bare_step_s'])}, shoal {format_seconds(figure['shoal_step_s'])} "
        f"a step; ratio {figure['ratio']:.3f} ({figure['ratio_low']:.3f} to {figure['ratio_high']:.3f}, "
        f"{figure['rounds']} rounds)"
    )


def _start(arguments: argparse.Namespace) -> dict[str, float]:
    from shoal.bench.start import bench_start

    figures = bench_start(arguments.path)
    if not arguments.json:
        for name, seconds in figures.items():
            print(f"{name}: {format_seconds(seconds)}")
    return figures

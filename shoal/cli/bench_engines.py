"""`shoal bench engines`: ZeRO by torch's engine beside ZeRO by DeepSpeed."""

import argparse
from pathlib import Path
from typing import Any

from shoal.cli import flags
from shoal.core.errors import ConfigError
from shoal.core.units import format_bytes, format_seconds

ABOUT = "ZeRO as shoal runs it (FSDP2) beside ZeRO by DeepSpeed: step time and memory."
EXAMPLE = """\
example:
  shoal bench engines examples/gpt.py
  shoal bench engines examples/gpt.py --workers 4 --zero 2,3 --rounds 20 --json

Both train the job in the same processes, in turns, for the time of a step; and each by itself, for its memory. A ratio
below 1 says that shoal's own takes less. Needs DeepSpeed: pip install 'shoal[deepspeed]'
"""
_MOST_WORKERS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of this kind."""
    parser.add_argument("path", type=Path, metavar="JOB", help="a job file")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="how many workers (default: 2)")
    parser.add_argument("--zero", default="1,2,3", metavar="Z,Z", help="the stages of ZeRO (default: 1,2,3)")
    parser.add_argument(
        "--rounds", type=int, default=15, metavar="N", help="how often the two take turns (default: 15)"
    )
    parser.add_argument("--steps", type=int, default=1, metavar="S", help="how many steps a turn (default: 1)")


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure; show the table unless JSON is asked for; return the figures."""
    file = flags.existing(arguments.path)
    stages = _stages(arguments.zero)
    rounds, steps = flags.whole("--rounds", arguments.rounds), flags.whole("--steps", arguments.steps)
    if not 2 <= arguments.workers <= _MOST_WORKERS:
        raise ConfigError(f"--workers {arguments.workers}: ZeRO needs at least 2 workers, and at most {_MOST_WORKERS}.")
    from rich.console import Console

    from shoal.bench.engines import bench_engines
    from shoal.parallel.deepspeed.load import check_installed

    check_installed()

    figures = []
    with Console(stderr=True).status("starting") as status:
        for zero in stages:
            figures.append(
                bench_engines(file, workers=arguments.workers, zero=zero, rounds=rounds, steps=steps, say=status.update)
            )
    if not arguments.json:
        _show(figures)
    return figures


def _stages(text: str) -> list[int]:
    stages = [part.strip() for part in text.split(",")]
    if not all(stage in ("1", "2", "3") for stage in stages):
        raise ConfigError(f"--zero {text!r}: write stages from 1 to 3, like --zero 1,2,3.")
    return [int(stage) for stage in dict.fromkeys(stages)]


def _show(figures: list[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("")
    for name in ("step, shoal", "DeepSpeed", "ratio (95%)", "peak, shoal", "DeepSpeed", "ratio"):
        table.add_column(name, justify="right", no_wrap=True)
    for figure in figures:
        table.add_row(
            f"ZeRO-{figure['zero']}",
            format_seconds(figure["torch_step_s"]),
            format_seconds(figure["deepspeed_step_s"]),
            f"{figure['step_ratio']:.2f} ({figure['step_ratio_low']:.2f} to {figure['step_ratio_high']:.2f})",
            format_bytes(max(figure["torch_peak_bytes"])),
            format_bytes(max(figure["deepspeed_peak_bytes"])),
            f"{figure['peak_ratio']:.2f}",
        )
    first = figures[0]
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a file has no width, and the table must not be cut to rich's default
    console.print(f"{first['job']}, {first['workers']} workers, {first['rounds']} rounds; the peak of the worst worker")
    console.print(table)

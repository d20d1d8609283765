"""`shoal attach`: show again how a run on a cluster goes."""

import argparse
from pathlib import Path

ABOUT = "Show how a run on a cluster goes, from the login node; Ctrl-C leaves it running."
EXAMPLE = """\
example:
  shoal attach runs/train-1          its place in the queue, then its progress, then its summary
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, such as runs/train-1")


def run(arguments: argparse.Namespace) -> int:
    """Show the run until it ends, and then its summary."""
    from rich.console import Console

    from shoal.cli.slurm_train import follow_run, show_result
    from shoal.core.run_folder import RunFolder

    folder = RunFolder.open(arguments.run_folder)
    follow_run(folder, Console(stderr=True), is_new=False)
    show_result(folder, as_json=arguments.json)
    return 0

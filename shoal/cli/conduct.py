"""`shoal conduct`: what the batch script of a training job runs; not for people."""

import argparse
import sys
from pathlib import Path

ABOUT = ""
EXAMPLE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")


def run(arguments: argparse.Namespace) -> int:
    """Start the run's workers in this allocation, and write down how they ended."""
    from shoal.core.run_folder import RunFolder
    from shoal.core.toml import read_toml
    from shoal.fault.checkpoint.manifest import committed, step_of
    from shoal.launch.slurm.conducting import conduct
    from shoal.report.page import write_page
    from shoal.spec.plan import Plan

    folder = RunFolder.open(arguments.run_folder)

    def conclude(status: str, message: str) -> None:
        folder.write_result(status, message)
        write_page(folder)

    def last_step() -> int:
        return max((step_of(path) for path in committed(folder.checkpoints)), default=0)

    ending = conduct(folder, workers=read_toml(Plan, folder.plan_toml).workers, last_step=last_step, conclude=conclude)
    if ending.error is not None:
        print(f"{type(ending.error).__name__}: {ending.error}", file=sys.stderr, flush=True)
    return ending.exit_code

"""`shoal host`: what a training job runs on each of its nodes; not for people."""

import argparse
from pathlib import Path

ABOUT = ""
EXAMPLE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")


def run(arguments: argparse.Namespace) -> int:
    """Start and watch this node's workers of the run."""
    from shoal.core.run_folder import RunFolder
    from shoal.core.toml import read_toml
    from shoal.launch.slurm.hosting import host_workers
    from shoal.spec.plan import Plan
    from shoal.spec.record import JobRecord

    folder = RunFolder.open(arguments.run_folder)
    record = read_toml(JobRecord, folder.job_toml)
    return host_workers(folder, read_toml(Plan, folder.plan_toml), is_program=record.is_program)

"""`shoal conduct`: what the batch script of a training job runs; not for people."""

import argparse
import os
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
    from shoal.core.run_lock import held
    from shoal.core.toml import read_toml
    from shoal.fault.checkpoint.manifest import committed, step_of
    from shoal.launch.slurm.conducting import conduct
    from shoal.launch.slurm.ending import Ending
    from shoal.report.page.conclude import conclude
    from shoal.spec.plan import Plan
    from shoal.spec.record import JobRecord
    from shoal.training.loggers.following import followed

    folder = RunFolder.open(arguments.run_folder)

    def write_down(ending: Ending) -> None:
        conclude(folder, ending.status, str(ending.error or ""), goes_on=ending.can_go_on)

    def last_step() -> int:
        return max((step_of(path) for path in committed(folder.checkpoints)), default=0)

    plan, record = read_toml(Plan, folder.plan_toml), read_toml(JobRecord, folder.job_toml)
    job = os.environ.get("SLURM_JOB_ID", "")
    with held(folder, job=job), followed(folder, say=lambda line: print(line, file=sys.stderr, flush=True)):
        ending = conduct(
            folder,
            workers=plan.workers,
            timeout_s=plan.timeout_s,
            stages=plan.mesh.pipeline,
            goes_on=plan.goes_on and not record.is_program,
            last_step=last_step,
            conclude=write_down,
            starts_again=not record.is_program,  # which keeps nothing that it could go on from
        )
    if ending.error is not None:
        print(f"{type(ending.error).__name__}: {ending.error}", file=sys.stderr, flush=True)
    return ending.exit_code

"""`shoal cancel`: end a run on a cluster, with a checkpoint."""

import argparse
import json
import time
from pathlib import Path

from shoal.core.units import format_seconds

ABOUT = "End a run on a cluster: it writes a checkpoint, and its job ends."
EXAMPLE = """\
example:
  shoal cancel runs/train-1          a checkpoint, then the end; shoal train FILE --slurm --resume runs/train-1 goes on
  shoal cancel runs/train-1 --now    at once; the last checkpoint stays
"""
_TICK_S = 0.5
_MARGIN_S = 30.0
"""Of a job that has ended, until Slurm has noticed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, such as runs/train-1")
    parser.add_argument("--now", action="store_true", help="do not wait for a checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Give the run notice, wait until its job has ended, and end it where it has not."""
    from shoal.core.run_folder import RunFolder
    from shoal.launch.slurm import commands
    from shoal.launch.slurm.following import Following, read_submitted
    from shoal.launch.slurm.sbatch import CANCELLED

    folder = RunFolder.open(arguments.run_folder)
    submitted = read_submitted(folder)
    job = submitted.job
    state = commands.states([job])[job]
    if state.is_over:
        return _say(arguments, job, f"Job {job} has ended already: {state.state}.")
    (folder.slurm / CANCELLED).touch()  # so that the job is not requeued when it has stopped
    if state.state == "RUNNING" and not arguments.now:
        _progress(arguments, f"job {job} has {format_seconds(submitted.notice_s)} to write a checkpoint ...")
        commands.notify(job)
        until_s = time.monotonic() + submitted.notice_s + _MARGIN_S
        following = Following(job, lambda _: None)  # asks seldom, and again where it gets no answer
        while time.monotonic() < until_s and ((now := following.look()) is None or now.state in commands.GOING):
            time.sleep(_TICK_S)
    commands.cancel([job])
    message = folder.read_result()["message"]
    return _say(arguments, job, f"Job {job} is cancelled. {message}".strip())


def _progress(arguments: argparse.Namespace, line: str) -> None:
    if not arguments.json:
        print(line, flush=True)


def _say(arguments: argparse.Namespace, job: str, line: str) -> int:
    print(json.dumps({"run": str(arguments.run_folder), "job": job, "message": line}) if arguments.json else line)
    return 0

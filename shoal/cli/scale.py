"""`shoal scale`: have a run go on with more workers, or with fewer."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli import flags
from shoal.core.errors import ConfigError

if TYPE_CHECKING:
    from shoal.core.run_folder import RunFolder
    from shoal.launch.wishes import Launcher
    from shoal.spec.record import JobRecord

ABOUT = "Have a run that is being trained on this machine go on with more workers, or with fewer."
EXAMPLE = """\
example:
  shoal scale runs/train-1 --workers 4      those that are added join between two steps; it stays the same training
  shoal scale runs/train-1 --workers 1      the others end at once, and the step under way is done again
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, such as runs/train-1")
    parser.add_argument("--workers", type=int, required=True, metavar="N", help="how many it is to go on with")


def run(arguments: argparse.Namespace) -> int:
    """Ask the run's launcher for it, if the run can do that."""
    from shoal.core.run_folder import RunFolder
    from shoal.core.toml import read_toml
    from shoal.launch.wishes import ask, read_launcher
    from shoal.spec.plan import Plan
    from shoal.spec.record import JobRecord
    from shoal.training.scaled import check_scaled

    workers = flags.whole("--workers", arguments.workers)
    folder = RunFolder.open(arguments.run_folder)
    plan, job = read_toml(Plan, folder.plan_toml), read_toml(JobRecord, folder.job_toml)
    _check_trained(folder, workers)
    launcher = read_launcher(folder)
    if not job.is_program:
        check_scaled(plan, workers, job, most=launcher.workers if launcher is not None else plan.workers)
    _check_launcher(folder, job, launcher)
    try:
        ask(folder, workers)
    except OSError as error:
        raise ConfigError(f"{folder.path} cannot be asked for other workers: {error}.") from None
    line = f"{folder.path} is asked to go on with {workers} {'worker' if workers == 1 else 'workers'}."
    print(json.dumps({"run": str(folder.path), "workers": workers, "message": line}) if arguments.json else line)
    return 0


def _check_trained(folder: "RunFolder", workers: int) -> None:
    from shoal.core.run_lock import is_held

    if is_held(folder):
        return
    if folder.read_result()["status"] == "done":
        raise ConfigError(f"{folder.path} has come to its end: no workers train it any more.")
    raise ConfigError(
        f"nobody trains {folder.path} now. Go on with it: shoal train FILE --resume {folder.path} --workers {workers}"
    )


def _check_launcher(folder: "RunFolder", job: "JobRecord", launcher: "Launcher | None") -> None:
    """Raise ConfigError where whoever trains the run is none that can start more workers."""
    from shoal.core.run_lock import holder_of

    holder = holder_of(folder)
    if launcher is not None and (launcher.host, launcher.process) == (holder.host, holder.process):
        return
    if job.is_program:
        why = "is that of a shoal.Program, whose workers are as many as it began with"
    elif holder.job:
        why = f"is trained by job {holder.job} of Slurm, which has as many workers as it asked for"
    else:
        why = (
            f"is trained by {holder}, which starts no workers (a loop of one's own, torchrun, srun), or has not "
            "started them yet"
        )
    raise ConfigError(
        f"{folder.path} {why}. Only `shoal train FILE --workers N` on one machine can start more. End the run, and go "
        "on with it: --resume"
    )

"""`shoal worker`: what launchers start; not for people."""

import argparse
import os
import sys
from pathlib import Path

from shoal.launch.parent import die_with_parent

ABOUT = ""
EXAMPLE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--parent", type=int, metavar="PID", help="the process that reads our events and must outlive us"
    )


def run(arguments: argparse.Namespace) -> int:
    """Be one worker of a run."""
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    from shoal.training.worker import work

    code = work(arguments.run_folder, is_watched=arguments.parent is not None)
    if code != 0:
        # Without Python's own way out, which waits for threads that may wait for a worker that is gone: the sockets
        # close at once, and the others learn of it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code

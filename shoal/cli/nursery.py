"""`shoal nursery`: the process that launchers have their workers forked from; not for people."""

import argparse
import socket

from shoal.core.notice import leave_to_others
from shoal.launch.forking import serve
from shoal.launch.parent import die_with_parent

ABOUT = ""
EXAMPLE = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("--control", type=int, required=True, metavar="FD", help="the socket of the launcher")
    parser.add_argument("--parent", type=int, required=True, metavar="PID", help="the launcher, who must outlive us")


def run(arguments: argparse.Namespace) -> int:
    """Import all that workers need, and fork them; in each of those, be it."""
    die_with_parent(arguments.parent)
    leave_to_others()
    import shoal.training.worker  # noqa: F401  # this is what takes its time
    from shoal.cli.main import main

    forked = serve(socket.socket(fileno=arguments.control))
    return 0 if forked is None else main(forked)

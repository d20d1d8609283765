"""The flags that say how long a run may last, and how much notice it gets before it is ended."""

import argparse

from shoal.cli import flags
from shoal.core.notice import NOTICE_S, announce, parse_limit


def add_preempt_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "--wall-limit",
        metavar="TIME",
        help="stop with a checkpoint, and exit code 75, before so much time has passed: 3h59m, or 03:59:00; "
        "the end of a Slurm job is known without it",
    )
    parser.add_argument(
        "--notice",
        metavar="TIME",
        help=f"how long there is for it, also after SIGTERM, SIGUSR1 or SIGUSR2 (default: {NOTICE_S:g}s)",
    )


def read_preempt(arguments: argparse.Namespace) -> None:
    """Let this process, and the workers it starts, know what the flags say."""
    limit, notice = arguments.wall_limit, arguments.notice
    announce(
        limit_s=None if limit is None else flags.read("--wall-limit", parse_limit, limit),
        notice_s=None if notice is None else flags.read("--notice", parse_limit, notice),
    )

"""The flags that say what a run does when it loses a worker."""

import argparse
import dataclasses

from shoal.core.errors import ConfigError
from shoal.spec.plan import Plan

_GO_ON, _STOP = "go-on", "stop"


def add_elastic_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "--on-loss",
        choices=[_GO_ON, _STOP],
        help="when a worker is killed: go-on (default), while another is started in its place, or stop",
    )
    parser.add_argument(
        "--restarts", type=int, metavar="N", help="start each worker anew at most N times (default: the plan's, or 3)"
    )


def read_elastic(arguments: argparse.Namespace, plan: Plan) -> Plan:
    """Return `plan` with what the flags say."""
    on_loss = plan.on_loss
    if arguments.on_loss is not None:
        on_loss = dataclasses.replace(on_loss, go_on=arguments.on_loss == _GO_ON)
    if arguments.restarts is not None:
        if arguments.restarts < 0:
            raise ConfigError(f"--restarts {arguments.restarts}: a worker is started anew 0 times or more.")
        on_loss = dataclasses.replace(on_loss, restarts=arguments.restarts)
    return dataclasses.replace(plan, on_loss=on_loss)

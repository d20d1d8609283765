"""The flags that say what a run does when it loses a worker."""

import argparse
import dataclasses

from shoal.core.errors import ConfigError, PlanError
from shoal.spec.plan import Plan

_GO_ON, _REPLAN, _STOP = "go-on", "replan", "stop"


def add_elastic_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "--on-loss",
        choices=[_GO_ON, _REPLAN, _STOP],
        help="when a worker is killed: go-on (default), while another is started in its place; replan: the same, and "
        "where none comes and the others hold no whole model, with a shorter tensor or pipeline axis; or stop",
    )
    parser.add_argument(
        "--restarts", type=int, metavar="N", help="start each worker anew at most N times (default: the plan's, or 3)"
    )


def read_elastic(arguments: argparse.Namespace, plan: Plan) -> Plan:
    """Return `plan` with what the flags say."""
    on_loss = plan.on_loss
    if plan.engine != "torch" and (arguments.on_loss in (_GO_ON, _REPLAN) or arguments.restarts):
        raise PlanError(
            f"engine={plan.engine!r}: its workers cannot go on without one that is lost; the run ends, and --resume "
            "goes on with it from the last checkpoint. Leave --on-loss and --restarts out, or use --engine torch."
        )
    if arguments.on_loss is not None:
        goes_on = arguments.on_loss != _STOP
        on_loss = dataclasses.replace(on_loss, go_on=goes_on, replan=arguments.on_loss == _REPLAN)
    if arguments.restarts is not None:
        if arguments.restarts < 0:
            raise ConfigError(f"--restarts {arguments.restarts}: a worker is started anew 0 times or more.")
        on_loss = dataclasses.replace(on_loss, restarts=arguments.restarts)
    return dataclasses.replace(plan, on_loss=on_loss)

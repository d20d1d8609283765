"""`shoal log`: bring the numbers and files of a run to a logger, from its folder alone."""

import argparse
import json
import sys
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.spec.record import read_loggers

ABOUT = "Bring the numbers and files of a run to Weights & Biases or MLflow, or what these do not have of it yet."
EXAMPLE = """\
example:
  shoal log runs/gpt-1 --to wandb          a run that was trained without it, or while its server was out of reach
  shoal log runs/gpt-1 --to wandb,mlflow   to both; nothing that is there already is sent again

While a run is trained: shoal train train.py --log wandb
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, such as runs/gpt-1")
    parser.add_argument("--to", required=True, metavar="LOGGERS", help="wandb, mlflow, or both: wandb,mlflow")
    # What `shoal train --log` starts: until standard input is closed, then the rest. Not for people.
    parser.add_argument("--follow", action="store_true", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> int:
    """Deliver the run, and say where it is."""
    folder = RunFolder.open(arguments.run_folder)
    names = read_loggers(arguments.to)
    from shoal.training.loggers.delivery import Delivery
    from shoal.training.loggers.registry import LOGGERS, check_loggers

    if any(not LOGGERS[name].is_apart for name in names):
        raise ConfigError("--to tensorboard: its files are written while a run is trained. Give wandb or mlflow.")
    check_loggers(names)
    if arguments.follow:
        from shoal.training.loggers.following import follow

        return 0 if follow(folder, names[0], pipe=sys.stdin.buffer, say=_say) else 1
    found = {}
    for name in names:
        delivery = Delivery(folder, name, say=_say)
        if not delivery.finish():
            return 1
        found[name] = {"id": delivery.kept.id, "where": delivery.kept.where, "step": delivery.kept.step}
    if arguments.json:
        print(json.dumps(found))
    else:
        for name, kept in found.items():
            has = f"has {folder.name} up to step {kept['step']}: {kept['where']}"
            print(f"{name} {has if kept['where'] else 'is switched off, and was sent nothing.'}")
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)

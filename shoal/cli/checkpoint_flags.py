"""The flags that say when a run saves its state, and from where it goes on."""

import argparse
import dataclasses
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.spec.plan import Plan

LATEST = "latest"


def add_checkpoint_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    parser.add_argument(
        "--checkpoint-every", type=int, metavar="STEPS", help="write a checkpoint after so many steps, and at the end"
    )
    parser.add_argument("--keep", type=int, metavar="N", help="how many of the latest checkpoints stay (default: 2)")
    parser.add_argument(
        "--best", metavar="METRIC", help="the checkpoint with the lowest METRIC stays, too; with the highest: +METRIC"
    )
    parser.add_argument(
        "--checkpoint-local",
        metavar="DIR",
        help="write checkpoints to this folder of each node first, such as '$TMPDIR', and copy them to the run folder "
        "while training goes on",
    )
    parser.add_argument(
        "--on-checkpoint-error",
        choices=("continue", "stop"),
        help="what to do where one cannot be written, as on a full disk (default: continue)",
    )
    parser.add_argument(
        "--resume",
        nargs="?",
        const=LATEST,
        metavar="RUN",
        help="go on with a run from its last checkpoint, under any plan; without RUN, with the latest of FILE that has "
        "not ended, or else anew",
    )
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="begin with these weights: safetensors, as Hugging Face has them"
    )


def read_checkpoints(arguments: argparse.Namespace, plan: Plan) -> Plan:
    """Return `plan` with what the flags say."""
    asked: dict[str, Any] = {"resume": arguments.resume is not None}
    if arguments.checkpoint_every is not None:
        if arguments.checkpoint_every < 1:
            raise ConfigError(f"--checkpoint-every {arguments.checkpoint_every}: write one after at least 1 step.")
        asked["every_steps"] = arguments.checkpoint_every
    if arguments.keep is not None:
        asked["keep"] = arguments.keep
    if arguments.checkpoint_local is not None:
        asked["local"] = _local(arguments.checkpoint_local)
    if arguments.on_checkpoint_error is not None:
        asked["on_error"] = arguments.on_checkpoint_error
    if arguments.best is not None:
        asked["best"] = arguments.best.removeprefix("+")
        asked["best_is"] = "highest" if arguments.best.startswith("+") else "lowest"
    weights = plan.weights
    if arguments.weights is not None:
        if not arguments.weights.exists():
            raise ConfigError(f"there is no {arguments.weights} to begin with: --weights names a folder or a file.")
        weights = str(arguments.weights.resolve())  # workers may stand in another folder
    return dataclasses.replace(plan, checkpoint=dataclasses.replace(plan.checkpoint, **asked), weights=weights)


def _local(folder: str) -> str:
    """Return a folder of each node; whole, unless it begins with a variable: workers may stand in another folder."""
    return folder if folder.startswith(("$", "~")) else str(Path(folder).resolve())


def find_run(arguments: argparse.Namespace) -> tuple[Path, str | None]:
    """Return where the run is to lie, and its name; None: a new one."""
    if arguments.resume is None:
        return arguments.runs, arguments.name
    if arguments.resume == LATEST:
        from shoal.training.prepare import latest_run  # imports torch

        return arguments.runs, arguments.name or latest_run(arguments.runs, arguments.file.stem)
    if arguments.name is not None:
        raise ConfigError("--name names a new run, and --resume one that there is. Give one of the two.")
    path = Path(arguments.resume)
    folder = path if path.is_dir() else arguments.runs / path
    return (resolved := RunFolder.open(folder).path.resolve()).parent, resolved.name

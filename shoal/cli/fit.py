"""`shoal fit`: does it fit, on what, and the cheapest change that makes it fit."""

import argparse
import json
from pathlib import Path

from shoal.cli import flags
from shoal.spec.plan import PRECISIONS

ABOUT = "Say whether a model fits a device, what its memory goes to, and which changes would make it fit."
EXAMPLE = """\
example:
  shoal fit train.py --device H200 --micro-batch 8
  shoal fit config.json --device A100-80 --micro-batch 1 --sequence 4096     a Hugging Face config file
  shoal fit train.py --layers                                               on this machine, layer by layer
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("file", type=Path, metavar="FILE", help="a job file, or a Hugging Face config (.json)")
    parser.add_argument("--device", metavar="D", help="a device of the catalog, such as H200 (default: this machine's)")
    parser.add_argument(
        "--micro-batch", type=int, metavar="M", help="samples in one forward (default: the whole batch; 1 for a config)"
    )
    parser.add_argument("--precision", default="fp32", metavar="P", help="fp32 (default) or bf16")
    parser.add_argument("--layers", action="store_true", help="also show what was traced of each layer")
    parser.add_argument("--sequence", type=int, metavar="S", help="tokens in a sample, for a config file")


def run(arguments: argparse.Namespace) -> int:
    """Trace the model and show what it needs."""
    for flag in ("micro_batch", "sequence"):
        if getattr(arguments, flag) is not None:
            flags.whole(f"--{flag.replace('_', '-')}", getattr(arguments, flag))
    flags.named("--precision", arguments.precision, {name: name for name in PRECISIONS})
    if arguments.device is not None:  # a wrong name is found before torch is loaded
        from shoal.planner.catalog import read_device

        read_device(arguments.device)
    from rich.console import Console

    with Console(stderr=True).status("loading") as status:
        from shoal.training.fitting import fit_job
        from shoal.training.planning import read_job

        batch_size = (arguments.micro_batch or 1) if arguments.file.suffix == ".json" else None
        estimate = fit_job(
            read_job(arguments.file, batch_size=batch_size, sequence=arguments.sequence),
            device=arguments.device,
            micro_batch=arguments.micro_batch,
            precision=arguments.precision,
            say=status.update,
        )
    if arguments.json:
        print(json.dumps(estimate.as_json()))
    else:
        from shoal.cli.fit_table import render

        Console().print(render(estimate, layers=arguments.layers))
    return 0

"""`shoal export`: the weights of a run, as others read them."""

import argparse
import json
from pathlib import Path

from shoal.core.run_folder import RunFolder

ABOUT = "Write the weights of a run's checkpoint as safetensors in Hugging Face's layout."
EXAMPLE = """\
example:
  shoal export runs/gpt-1 gpt-weights              the latest checkpoint
  shoal export runs/gpt-1 gpt-weights --step 500   that of step 500
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, such as runs/gpt-1")
    parser.add_argument("target", type=Path, metavar="DIR", help="where model.safetensors goes")
    parser.add_argument("--step", type=int, metavar="S", help="the step of the checkpoint (default: the latest)")


def run(arguments: argparse.Namespace) -> int:
    """Write the weights."""
    RunFolder.open(arguments.run_folder)
    from shoal.fault.checkpoint.weights import export  # imports torch: only once it is known that there is a run

    step = export(arguments.run_folder, arguments.target, step=arguments.step)
    if arguments.json:
        print(json.dumps({"step": step, "target": str(arguments.target)}))
    else:
        print(f"the weights after step {step} are in {arguments.target}")
    return 0

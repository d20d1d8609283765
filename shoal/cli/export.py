"""`shoal export`: the weights of a run, as others read them."""

import argparse
import json
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder

ABOUT = (
    "Write the weights of a run's checkpoint for plain transformers, safetensors or torch; shoal is not needed then."
)
EXAMPLE = """\
example:
  shoal export runs/gpt-1 gpt-weights                      the latest checkpoint, as the model's own library has it
  shoal export runs/gpt-1 gpt-weights --to hf --dtype bf16 --tokenizer tokenizer/    for AutoModel.from_pretrained
  shoal export runs/gpt-1 gpt-weights --to torch           model.pt, for torch.load(..., weights_only=True)
  shoal export runs/gpt-1 gpt-weights --step 500           that of step 500
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb's arguments."""
    parser.add_argument("run_folder", type=Path, metavar="RUN", help="the run's folder, such as runs/gpt-1")
    parser.add_argument("target", type=Path, metavar="DIR", help="where the files go")
    parser.add_argument(
        "--to",
        choices=("hf", "safetensors", "torch"),
        help="hf: a folder for from_pretrained; safetensors: model.safetensors; torch: model.pt (default: hf where the "
        "model is one of transformers, else safetensors)",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the numbers (default: as trained)")
    parser.add_argument("--tokenizer", type=Path, metavar="DIR", help="with hf: the tokenizer to put beside the model")
    parser.add_argument("--step", type=int, metavar="S", help="the step of the checkpoint (default: the latest)")


def run(arguments: argparse.Namespace) -> int:
    """Write the weights."""
    RunFolder.open(arguments.run_folder)
    if arguments.tokenizer is not None and not arguments.tokenizer.exists():
        raise ConfigError(f"there is no {arguments.tokenizer}: --tokenizer names the folder of a tokenizer.")
    from shoal.fault.checkpoint.weights import export  # imports torch: only once it is known that there is a run

    step = export(
        arguments.run_folder,
        arguments.target,
        step=arguments.step,
        to=arguments.to,
        dtype=arguments.dtype,
        tokenizer=arguments.tokenizer,
    )
    files = sorted(path.name for path in arguments.target.iterdir() if path.is_file())
    if arguments.json:
        print(json.dumps({"step": step, "target": str(arguments.target), "files": files}))
    else:
        print(f"the weights after step {step} are in {arguments.target}: {', '.join(files)}")
    return 0

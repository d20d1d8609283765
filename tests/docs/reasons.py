"""What is not run, and why: single commands here; a whole block says so in its first line."""

import re

NOT_RUN: dict[str, str] = {
    r"--slurm|shoal (attach|cancel) ": "it needs a Slurm cluster: tests/launch/slurm and tests/tasks run it on one",
    r"^shoal scale ": "it needs a run that is being trained: tests/training/test_scale.py has some",
    r"/scratch|/local/me": "this machine has no such disk",
    r"--tokenizer gpt2": "the tokenizer of GPT-2 is on a hub: tests/data/sources has others",
    r"^(python|make) .*bench": "it measures for minutes, and some need root",
    r"^(make|pytest) ": "it is what runs this, or takes minutes",
    r"^pip install": "it would change what is installed",
    r"^ssh ": "it needs another machine",
    r"^shoal bench engines": "it measures for minutes: tests/training/test_deepspeed.py has it at a small size",
    r"^shoal bench collectives": "it measures for a minute: tests/cli/test_bench_collectives.py has it at a small size",
    r"^shoal bench (step|start)": "it measures for minutes: only its arguments are tested",
    r"deepspeed": "every worker imports DeepSpeed for seconds: tests/training/test_deepspeed.py trains and verifies so",
    r"examples/(huggingface|timm_images)\.py": "its library takes seconds to import: tests/training/test_families.py "
    "trains it, with one worker",
    r"--to hf": "the run must be that of a model of transformers: tests/fault/test_export.py exports one",
}

AT_FULL_SIZE: dict[str, str] = {
    r"^torchrun .*-m shoal": "each worker imports torch by itself: tests/test_api.py does it with two workers",
    r"^shoal probe": "it measures this machine for half a minute: tests/cli/test_probe.py has a short one",
    r"llama-70b": "it searches for a quarter of a minute",
    r"^shoal bench loaders": "it measures for a quarter of a minute",
}
"""What is run only with --full-size."""


def why_not(command: str, *, full_size: bool) -> str | None:
    """Return why a command is not run, or None."""
    for pattern, reason in {**NOT_RUN, **({} if full_size else AT_FULL_SIZE)}.items():
        if re.search(pattern, command):
            return reason
    return None

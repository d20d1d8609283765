"""Which GPUs each worker of a node sees, so that tasks that run at once do not all go to the first."""

from collections.abc import Mapping, Sequence
from pathlib import Path

VARIABLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that this process may use: those that Slurm or the user has named, or all that there are."""
    if VARIABLE in env:
        return [name.strip() for name in env[VARIABLE].split(",") if name.strip()]
    return [str(number) for number in range(len(list(devices.glob("nvidia[0-9]*"))))]


def gpus_of(gpus: Sequence[str], workers: int) -> list[dict[str, str]]:
    """Return for each of `workers` the variable that names its GPUs; nothing where there are none, or one worker.

    Example: of 4 GPUs, 2 workers get 0,1 and 2,3; 3 get 0,1 and 2 and 3; 8 get 0, 1, 2, 3, 0, 1, 2, 3.
    """
    if not gpus or workers == 1:
        return [{} for _ in range(workers)]
    if workers >= len(gpus):
        return [{VARIABLE: gpus[number % len(gpus)]} for number in range(workers)]
    share, more = divmod(len(gpus), workers)
    ends = [(number + 1) * share + min(number + 1, more) for number in range(workers)]
    return [{VARIABLE: ",".join(gpus[begin:end])} for begin, end in zip([0, *ends], ends, strict=False)]

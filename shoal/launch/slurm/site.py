"""What differs from site to site, read from one small file: site.toml. Two examples lie in catalog/sites."""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from shoal.core.errors import ConfigError
from shoal.core.toml import read_toml

VARIABLE = "SHOAL_SITE"
"""The environment variable that names the file."""
HOME_FILE = Path("~/.config/shoal/site.toml")
ARRAY_LIMIT = 1001
"""Slurm's own default of MaxArraySize, where neither the file nor scontrol says it."""
_ANSWER_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Site:
    """How one cluster wants its jobs."""

    partition: str | None = None
    """Where jobs go that name none."""
    account: str | None = None
    gpu_flag: str = "--gpus-per-node={count}"
    """How GPUs are asked for; {count} stands for how many on each node."""
    gpus_per_worker: int = 0
    """How many GPUs each worker of a training run has; 0: it computes on the processor."""
    cpus_per_worker: int = 1
    options: tuple[str, ...] = ()
    """Further options of every job, such as "--constraint=milan"."""
    modules: tuple[str, ...] = ()
    """Loaded in the job, by `module load`, in this order."""
    setup: tuple[str, ...] = ()
    """Lines of bash that run in the job, after the modules."""
    tmpdir: str = ""
    """Where temporary files go on a node: a folder, or a variable that is set there, as "$SLURM_TMPDIR"."""
    array_limit: int = 0
    """The most elements of one array of jobs; 0: what scontrol says (MaxArraySize)."""
    job_limit: int = 200
    """The most jobs that one command puts into the queue."""

    def __post_init__(self) -> None:
        if "{count}" not in self.gpu_flag:
            raise ConfigError(f"gpu_flag={self.gpu_flag!r} in site.toml lacks {{count}}, as in --gres=gpu:{{count}}.")
        if self.gpus_per_worker < 0 or self.cpus_per_worker < 1:
            raise ConfigError(
                f"gpus_per_worker={self.gpus_per_worker}, cpus_per_worker={self.cpus_per_worker} in site.toml: a "
                "worker has at least 0 GPUs and 1 core."
            )
        if self.array_limit < 0 or self.job_limit < 1:
            raise ConfigError(
                f"array_limit={self.array_limit}, job_limit={self.job_limit} in site.toml: an array has at least "
                "1 element (0: as scontrol says), and at least 1 job may wait."
            )
        for line in (*self.options, *self.modules, *self.setup, self.tmpdir):
            if "\n" in line:
                raise ConfigError(f"{line!r} in site.toml has more than one line: write a list of lines.")


def read_site(path: Path | None = None) -> Site:
    """Return the site of `path`, of the file that SHOAL_SITE names, of ~/.config/shoal/site.toml, or the defaults."""
    named = path or (Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None)
    home = HOME_FILE.expanduser()
    file = named or (home if home.is_file() else None)
    site = read_toml(Site, file) if file is not None else Site()
    return site if site.array_limit else replace(site, array_limit=_max_array_size(os.environ.get("SLURM_CONF", "")))


@cache
def _max_array_size(_: str) -> int:
    """Return how many elements an array may have, as this cluster's controller says."""
    if shutil.which("scontrol") is None:
        return ARRAY_LIMIT
    try:
        asked = subprocess.run(
            ["scontrol", "show", "config"], capture_output=True, text=True, timeout=_ANSWER_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ARRAY_LIMIT
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", asked.stdout, re.MULTILINE)
    return max(1, int(found[1])) if found else ARRAY_LIMIT

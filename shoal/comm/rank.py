"""Who this process is. The only place that reads the variables launchers set.

Three launchers are understood: shoal's own and torchrun (RANK, WORLD_SIZE, ...), and srun (SLURM_PROCID, ...).
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.core.errors import ConfigError

MEMBER = "SHOAL_MEMBER"
"""The variable by which a launcher of ours says that it replaces lost workers, and who this one is."""


@dataclass(frozen=True)
class Rank:
    """One worker among `workers`, and where all of them meet."""

    index: int
    workers: int
    local_index: int
    """Which of the workers of this node."""
    local_workers: int
    """How many workers this node has."""
    store_host: str
    store_port: int
    store_is_hosted: bool
    """Whether the launcher hosts the rendezvous store; otherwise worker 0 does."""
    member: str = ""
    """What this process is called among those of a run that goes on when it loses some; see `comm.members`."""
    numbers: tuple[int, ...] = ()
    """What sentences call the workers, where some are lost; as 0, 1 and 3. Empty: by their index."""

    @property
    def number(self) -> int:
        """What sentences, and the event log, call this worker."""
        return self.number_of(self.index)

    def number_of(self, index: int) -> int:
        """Return what sentences call worker `index`."""
        return self.numbers[index] if index < len(self.numbers) else index


ALONE = Rank(0, 1, 0, 1, "", 0, store_is_hosted=False)

# Slurm numbers the steps that are not srun's (batch script, interactive shell) from the top of 32 bits.
_SLURM_FIRST_SPECIAL_STEP = 0xFFFFFFF0


def read_rank(env: Mapping[str, str] = os.environ) -> Rank | None:
    """Return who this process is by its launcher's variables, or None when no launcher started it."""
    if "RANK" in env and "WORLD_SIZE" in env:
        return _torchrun(env)
    if "SLURM_PROCID" in env and _is_srun_step(env):
        return _srun(env)
    return None


_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def variables_of(env: Mapping[str, str]) -> list[str]:
    """Return those of the variables that torchrun sets, or whoever does as it does, which are in `env`."""
    return [name for name in _RANK_VARIABLES if name in env]


def left_over(env: Mapping[str, str]) -> list[str]:
    """Return those that no launcher of this process has set, but a shell, or a launcher before."""
    is_started = "TORCHELASTIC_RUN_ID" in env or MEMBER in env or ("SLURM_PROCID" in env and _is_srun_step(env))
    return [] if is_started else variables_of(env)


def _torchrun(env: Mapping[str, str]) -> Rank:
    return Rank(
        index=_number(env, "RANK"),
        workers=_number(env, "WORLD_SIZE"),
        local_index=_number(env, "LOCAL_RANK", default=env["RANK"]),
        local_workers=_number(env, "LOCAL_WORLD_SIZE", default=env["WORLD_SIZE"]),
        store_host=env.get("MASTER_ADDR", "127.0.0.1"),
        store_port=_number(env, "MASTER_PORT"),
        store_is_hosted=_is_hosted(env),
        member=env.get(MEMBER, ""),
    )


def _srun(env: Mapping[str, str]) -> Rank:
    nodes = _number(env, "SLURM_STEP_NUM_NODES", default=env.get("SLURM_NNODES", "1"))
    workers = _number(env, "SLURM_STEP_NUM_TASKS", default=env.get("SLURM_NTASKS"))
    return Rank(
        index=_number(env, "SLURM_PROCID"),
        workers=workers,
        local_index=_number(env, "SLURM_LOCALID"),
        local_workers=_tasks_on_node(env, default=-(-workers // nodes)),
        # srun sets this address on every node; on one node nothing need listen beyond loopback.
        store_host=env.get("MASTER_ADDR") or ("127.0.0.1" if nodes == 1 else _first_host(env)),
        store_port=_number(env, "MASTER_PORT", default=str(_port_of_step(env))),
        store_is_hosted=_is_hosted(env),
    )


def _is_hosted(env: Mapping[str, str]) -> bool:
    return env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _is_srun_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    return step is not None and int(step) < _SLURM_FIRST_SPECIAL_STEP


def _tasks_on_node(env: Mapping[str, str], *, default: int) -> int:
    """Return this node's entry of SLURM_STEP_TASKS_PER_NODE, which reads like "2(x3),1"."""
    counts: list[int] = []
    for item in env.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        count, _, times = item.partition("(x")
        if count:
            counts += [int(count)] * int(times.rstrip(")") or 1)
    node = _number(env, "SLURM_NODEID", default="0")
    return counts[node] if node < len(counts) else default


def _first_host(env: Mapping[str, str]) -> str:
    """Return the first host of a list like "gpu[03-05,09]-a,login1" -> "gpu03-a"."""
    nodes = env.get("SLURM_STEP_NODELIST", env.get("SLURM_JOB_NODELIST", ""))
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)  # up to a comma outside of brackets
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", first[0]) if first else ""


def _port_of_step(env: Mapping[str, str]) -> int:
    """Return a port that all workers of a step compute alike and two steps of one node seldom share."""
    job, step = _number(env, "SLURM_JOB_ID", default="0"), _number(env, "SLURM_STEP_ID", default="0")
    return 20_000 + (job * 31 + step) % 12_000  # below 32768, where Linux starts to hand out ports by itself


def _number(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    value = env.get(name, default)
    if value is None:
        raise ConfigError(f"{name} is not set, but other variables of the same launcher are. Set it, or unset them.")
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name}={value!r} is not a whole number.") from None

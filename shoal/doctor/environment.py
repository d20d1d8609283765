"""Variables that were left over, or set for another purpose, and that break or slow down runs."""

import os
from collections.abc import Mapping

from shoal.comm.rank import left_over, read_rank, variables_of
from shoal.core.errors import ConfigError
from shoal.doctor.finding import Finding, ok, problem, warning

_SUBJECT = "variables"
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": (("1",), "every operation on a GPU is waited for"),
    "NCCL_IB_DISABLE": (("1",), "NCCL does without InfiniBand"),
    "NCCL_P2P_DISABLE": (("1",), "GPUs of one host pass data by way of its memory, without NVLink"),
    "NCCL_SHM_DISABLE": (("1",), "processes of one host pass data through the network"),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": (("1",), "memory of GPUs is asked for and given back at every operation"),
    "TORCH_DISTRIBUTED_DEBUG": (("DETAIL",), "every collective is checked by another one"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": (("0",), "a worker that is lost is waited for without end"),
    "TORCH_NCCL_BLOCKING_WAIT": (("1",), "every collective on GPUs is waited for"),
}


def check_variables(env: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look for variables of launchers that did not start this process, and for those that slow runs down."""
    found = [*_launcher(env), *_hidden_gpus(env)]
    for name, (values, what) in _SLOW.items():
        if env.get(name, "").upper() in values:
            found.append(warning(_SUBJECT, f"{name}={env[name]}: {what}", f"unset {name}, unless you look for a fault"))
    if "SHOAL_FAULTS" in env:
        fact = "SHOAL_FAULTS is set: faults are made on purpose in every run"
        found.append(warning(_SUBJECT, fact, "unset SHOAL_FAULTS, unless that is what you want"))
    return found or [ok(_SUBJECT, "none of those that break or slow down runs is set")]


def _launcher(env: Mapping[str, str]) -> list[Finding]:
    left = left_over(env)
    try:
        rank = read_rank(env)
    except ConfigError as error:
        return [problem(_SUBJECT, f"{error}", f"unset {' '.join(variables_of(env))}")]
    if rank is not None and left:
        fact = f"{_pairs(env, left)}, but no launcher started this: every command takes itself for worker {rank.index}"
        fact += f" of {rank.workers}" + (", and waits for the others" if rank.workers > 1 else "")
        return [problem(_SUBJECT, fact, f"unset {' '.join(left)}")]
    if left:
        fact = f"{_pairs(env, left)}: left over from a launcher, and taken seriously under srun and torchrun"
        return [warning(_SUBJECT, fact, f"unset {' '.join(left)}")]
    return []


def _hidden_gpus(env: Mapping[str, str]) -> list[Finding]:
    if env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        fact = f"CUDA_VISIBLE_DEVICES={env['CUDA_VISIBLE_DEVICES']!r} hides all GPUs"
        return [warning(_SUBJECT, fact, "unset CUDA_VISIBLE_DEVICES, unless runs are to compute on the processor")]
    return []


def _pairs(env: Mapping[str, str], names: list[str]) -> str:
    return ", ".join(f"{name}={env[name]}" for name in names)

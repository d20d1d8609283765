"""All checks, at the same time, each with a limit: whatever hangs, the others are told."""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from shoal.doctor import clock, environment, host, limits, native, network, packages, shared_memory, slurm, storage
from shoal.doctor.finding import Finding, problem, warning
from shoal.doctor.torch_install import LIMIT_S as TORCH_S
from shoal.doctor.torch_install import check_torch

CHECK_S = 20.0
"""Longer than any of them takes, Slurm's four questions included."""


@dataclass(frozen=True)
class Check:
    """One subject, and what looks at it."""

    subject: str
    look: Callable[[], list[Finding]]
    limit_s: float = CHECK_S


def all_checks(runs: Path, env: Mapping[str, str]) -> list[Check]:
    """Return the checks, in the order in which they are told; `runs` is where run folders go."""
    return [
        Check("Python", packages.check_python),
        Check("packages", packages.check_packages),
        # Its own limit ends its processes; this one is only for what lies around it.
        Check("torch", partial(check_torch, env, limit_s=TORCH_S), TORCH_S + CHECK_S),
        Check("C library", native.check_native),
        Check("extras", packages.check_extras),
        Check("variables", partial(environment.check_variables, env)),
        Check("ports", network.check_ports),
        Check("host name", partial(network.check_host_name, env=env)),
        Check("interfaces", partial(network.check_interfaces, env)),
        Check("shared memory", shared_memory.check_left),
        Check("shared memory", shared_memory.check_shared_memory),
        Check("cores", partial(host.check_cores, env)),
        Check("memory", host.check_memory),
        Check("limits", limits.check_limits),
        Check("storage", partial(storage.check_runs, runs)),
        Check("temporary files", storage.check_temporary),
        Check("staging", storage.check_tiers),
        Check("clock", clock.check_clock),
        Check("storage's clock", partial(clock.check_storage_clock, runs)),
        Check("Slurm", partial(slurm.check_slurm, runs, env)),
    ]


def examine(checks: list[Check]) -> Iterator[Finding]:
    """Start all checks, and yield what they find in their order; one that hangs is named, and left behind."""
    begin_s = time.monotonic()
    answers: list[queue.SimpleQueue[list[Finding]]] = [queue.SimpleQueue() for _ in checks]
    for check, answer in zip(checks, answers, strict=True):
        # A daemon: one that hangs in the kernel, as on a dead file server, does not keep the command from ending.
        threading.Thread(target=_look, args=(check, answer), daemon=True).start()
    for check, answer in zip(checks, answers, strict=True):
        try:
            yield from answer.get(timeout=max(0.0, begin_s + check.limit_s - time.monotonic()))
        except queue.Empty:
            fact = f"no answer within {check.limit_s:g} s"
            yield problem(check.subject, fact, "something hangs: a dead file server, name server or controller, mostly")


def _look(check: Check, answer: "queue.SimpleQueue[list[Finding]]") -> None:
    try:
        answer.put(check.look())
    except Exception as error:
        fact = f"it could not be looked at: {type(error).__name__}: {error}"
        answer.put(
            [warning(check.subject, fact, "see whether the lines above say why; else, it is a mistake of shoal")]
        )

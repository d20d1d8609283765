"""How long a run may last, and how much notice it gets before it is ended: known to whoever allocates, not to a plan.

Launchers and workers learn it from the environment, which a worker has from its launcher:

    SHOAL_NOTICE_S       seconds from a signal to the end (`--notice`); 30 without it, as Slurm's KillWait
    SHOAL_WALL_END       when it ends, in seconds since 1970 (`--wall-limit`, counted from the command's start)
    SLURM_JOB_END_TIME   the same, where Slurm sets it

The earlier of the two ends counts.
"""

import os
import re
import signal
import time
from collections.abc import Mapping, MutableMapping

from shoal.core.errors import ConfigError

NOTICE_S = 30.0
"""Between SIGTERM and SIGKILL: the default of Slurm (KillWait), Kubernetes and torchrun."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What asks a run to stop."""
SAME_S = 1.0
"""Signals so close to each other are one request: a batch system tells all processes, and a launcher passes it on."""

_PARTS = re.compile(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m(?:in)?)?(?:(\d+)s?)?")
_CLOCK = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)")
_IN_S = (86400, 3600, 60, 1)


def parse_limit(text: str) -> float:
    """Return the seconds of a limit: "3h59m", "90m", "45s", "1d12h", or as Slurm writes it, "1-12:00:00"."""
    match = _PARTS.fullmatch(text) or _CLOCK.fullmatch(text)
    seconds = sum(int(part) * unit for part, unit in zip(match.groups(), _IN_S, strict=True) if part) if match else 0
    if seconds <= 0:
        raise ConfigError(f"{text!r} is not a time limit. Write it like 3h59m, 90m, 45s or 03:59:00.")
    return float(seconds)


def leave_to_others() -> None:
    """Ignore what asks to stop: a batch system sends that to every process, and this one ends when another does."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def announce(
    *, limit_s: float | None = None, notice_s: float | None = None, env: MutableMapping[str, str] = os.environ
) -> None:
    """Let this process, and those it starts, end in `limit_s` seconds, with `notice_s` of notice."""
    if notice_s is not None:
        env["SHOAL_NOTICE_S"] = repr(notice_s)
    if limit_s is not None:
        env["SHOAL_WALL_END"] = repr(time.time() + limit_s)
        if limit_s <= read_notice_s(env):
            raise ConfigError(
                f"a limit of {limit_s:g} s with {read_notice_s(env):g} s of notice leaves no time to train. "
                "Give a longer --wall-limit, or a shorter --notice."
            )


def read_notice_s(env: Mapping[str, str] = os.environ) -> float:
    """Return the seconds between a signal and the end."""
    notice_s = _seconds(env, "SHOAL_NOTICE_S")
    if notice_s is None:
        return NOTICE_S
    if not notice_s > 0:
        raise ConfigError(f"SHOAL_NOTICE_S={notice_s:g}: a notice must be more than 0 seconds.")
    return notice_s


def read_wall_end(env: Mapping[str, str] = os.environ) -> float | None:
    """Return when the time allowed is over, in seconds since 1970, or None where nobody said."""
    ends = [_seconds(env, "SHOAL_WALL_END"), _seconds(env, "SLURM_JOB_END_TIME")]
    return min((end for end in ends if end is not None), default=None)


def _seconds(env: Mapping[str, str], name: str) -> float | None:
    text = env.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r} is not a number of seconds. Give one, or unset it.") from None

"""The flags that say how the gradients of replicas meet: each overrides a line of the plan's [sync]."""

import argparse
import dataclasses
from typing import Any

from shoal.core.errors import ConfigError
from shoal.spec.plan import Plan
from shoal.spec.sync import CODECS, LATE, MODES, OUTER, PLACES, Sync

AUTO = "auto"
_FLAGS = {
    "sync": "mode",
    "codec": "codec",
    "deadline": "deadline_s",
    "quorum": "quorum",
    "late": "late",
    "outer": "outer",
    "servers": "servers",
    "server_place": "place",
    "asynchronous": "asynchronous",
    "max_staleness": "max_staleness",
}
"""Each flag and the field that it sets."""
_MODE_OF = {
    "deadline": "deadline",
    "quorum": "deadline",
    "late": "deadline",
    "local_steps": "local",
    "outer": "local",
    "servers": "server",
    "server_place": "server",
    "asynchronous": "server",
    "max_staleness": "server",
}
"""The mode that each flag goes with."""


def add_sync_flags(parser: argparse.ArgumentParser) -> None:
    """Declare them."""
    group = parser.add_argument_group("how the gradients of replicas meet")
    group.add_argument(
        "--sync",
        choices=MODES,
        help="all-reduce (default): all wait for all, at every step; deadline: those who are there in time; local: "
        "after some local steps; server: at servers, which hold the parameters",
    )
    group.add_argument(
        "--codec",
        choices=CODECS,
        help="what gradients are squeezed through on their way; auto: what the measured link makes pay (default: none)",
    )
    group.add_argument(
        "--deadline", type=float, metavar="S", help="deadline: wait S seconds for the others (default: by past steps)"
    )
    group.add_argument("--quorum", type=int, metavar="N", help="deadline: go on as soon as N workers are there")
    group.add_argument("--late", choices=LATE, help="deadline: late gradients are added to the next step, or dropped")
    group.add_argument(
        "--local-steps", metavar="H", help="local: meet after H steps; auto: so that 5%% of the time goes into it"
    )
    group.add_argument("--outer", choices=OUTER, help="local: what a meeting makes of what the workers have found")
    group.add_argument("--servers", type=int, metavar="K", help="server: how many servers there are")
    group.add_argument("--server-place", choices=PLACES, help="server: beside workers, or processes of their own")
    group.add_argument(
        "--asynchronous", action="store_true", default=None, help="server: apply each gradient as it comes"
    )
    group.add_argument(
        "--max-staleness", type=int, metavar="N", help="server, asynchronous: be at most N steps ahead of the slowest"
    )
    group.add_argument(
        "--no-live-shares", action="store_true", help="all-reduce: a slow worker keeps its share of each batch"
    )


def read_sync(arguments: argparse.Namespace, plan: Plan) -> Plan:
    """Return `plan` with what the flags say; `--local-steps auto` is for `asks_for_local_steps` to see."""
    asked: dict[str, Any] = {
        field: value for flag, field in _FLAGS.items() if (value := getattr(arguments, flag)) is not None
    }
    if arguments.local_steps not in (None, AUTO):
        asked["local_steps"] = _steps(arguments.local_steps)
    mode = asked.get("mode", plan.sync.mode)
    for flag, needed in _MODE_OF.items():
        if getattr(arguments, flag) is not None and mode != needed:
            name = f"--{flag.replace('_', '-')}"
            raise ConfigError(f"{name} goes with --sync {needed}, and this run has --sync {mode}.")
    if mode != plan.sync.mode:  # settings of another mode would be refused
        kept = Sync(codec=plan.sync.codec, way=plan.sync.way, bucket_bytes=plan.sync.bucket_bytes)
        sync = dataclasses.replace(kept, **asked)
    else:
        sync = dataclasses.replace(plan.sync, **asked)
    batch = dataclasses.replace(plan.batch, live=plan.batch.live and not arguments.no_live_shares)
    return dataclasses.replace(plan, sync=sync, batch=batch)


def asks_for_local_steps(arguments: argparse.Namespace) -> bool:
    """Return whether the link is to say how many local steps there are."""
    return bool(arguments.local_steps == AUTO)


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--local-steps {text!r}: give a number of steps from 1 on, or auto.")
    return int(text)

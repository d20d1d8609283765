"""Reading what flags say: an error names the flag."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from shoal.core.errors import ConfigError, did_you_mean
from shoal.core.units import parse_rate
from shoal.planner.catalog import read_link
from shoal.spec.device import Link

JSON_HELP = "print one JSON object on stdout, and nothing else there"
"""The help of --json, which every verb has."""

T = TypeVar("T")
G = TypeVar("G")

_MOST = 10**9


def read(flag: str, parse: Callable[[G], T], given: G) -> T:
    """Return what `parse` makes of `given`."""
    try:
        return parse(given)
    except ConfigError as error:
        raise ConfigError(f"{flag} {error}") from None


def existing(file: Path) -> Path:
    """Return `file`, which must be there."""
    if not file.is_file():
        raise ConfigError(f"there is no file {file}.")
    return file


def needed(flag: str, parse: Callable[[G], T], given: G | None, example: str) -> T:
    """Return the same of a flag that must be given."""
    if given is None:
        raise ConfigError(f"{flag} is missing. Write it like {flag} {example}.")
    return read(flag, parse, given)


def link(flag: str, given: str, latency_s: float = 0.0) -> Link:
    """Return the link that `given` says: a rate, with `latency_s`, or the name of one of the catalog."""
    if given[:1].isalpha():
        return read_link(given)
    return Link(source=flag, bytes_per_s=read(flag, parse_rate, given), latency_s=latency_s)


def named(flag: str, name: str, known: Mapping[str, T]) -> T:
    """Return what `known` has under `name`."""
    if name not in known:
        raise ConfigError(f"{flag} {name!r} is none.{did_you_mean(name, list(known))}")
    return known[name]


def whole(flag: str, count: int) -> int:
    """Return `count`, which counts things that there are."""
    if not 1 <= count <= _MOST:
        raise ConfigError(f"{flag} {count}: give a number from 1 to {_MOST:,}.")
    return count


def above_0(flag: str, value: float) -> float:
    """Return `value`, which must be more than 0."""
    if not 0 < value <= _MOST:
        raise ConfigError(f"{flag} {value:g}: give a number above 0, and {_MOST:,} at most.")
    return value


def only_with_slurm(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Raise ConfigError if one of the flags `names`, which are about jobs on a cluster, is given without --slurm."""
    values = {name: getattr(arguments, name) for name in names}
    given = [name for name, value in values.items() if value is not None and value is not False and value != []]
    if given and not arguments.slurm:
        flag = given[0].replace("_", "-")
        raise ConfigError(f"--{flag} is about jobs on a cluster. Give --slurm, too, or leave it out.")

"""A worker of `shoal bench collectives`: every way to sum a tensor over the workers, in one process, taking turns.

1. The link between two workers is measured, by the messages that the algorithms send.
2. Every way sums every size once, of numbers whose sum is known and exact, and is refused if one number is wrong.
3. All take turns (see turns.py). What a turn takes is what it takes the slowest worker; worker 0 writes all of them.
"""

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.turns import PROGRESS, Times, take_turns
from shoal.comm.algorithms import ALL_REDUCE, Wire
from shoal.comm.algorithms.two_level import AllReduce
from shoal.comm.device import set_threads
from shoal.comm.group import joined
from shoal.comm.pairs import measure_links
from shoal.comm.rank import Rank, read_rank
from shoal.comm.shm.group import SharedGroup, join
from shoal.comm.store import connect
from shoal.core.errors import PlanError, ShoalError, WorkerFailed
from shoal.core.files import write_whole
from shoal.core.units import format_bytes
from shoal.launch.parent import die_with_parent

_TIMEOUT_S = 60.0
_LINK_S = 1.0
_SAY_EVERY_S = 0.5
_PERIOD = 61
"""Of the numbers that are summed: a prime, so that a part in the wrong place is seen."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """One way to sum: `all_reduce(numel)` sums the first numbers of `place`, in place."""

    all_reduce: Callable[[int], None]
    place: torch.Tensor


def main(folder: str, parent: str, seconds: str, sizes: str) -> None:
    """Measure for about `seconds`; worker 0 writes times.json into `folder`."""
    die_with_parent(int(parent))
    rank = read_rank()
    assert rank is not None, "the launcher says who this is"
    set_threads(rank)
    store = connect(rank, timeout_s=_TIMEOUT_S)
    with joined(rank, store, device=torch.device("cpu"), timeout_s=_TIMEOUT_S):
        found = measure(rank, store, seconds=float(seconds), sizes=[int(size) for size in sizes.split(",")])
        if rank.index == 0:
            write_whole(Path(folder) / "times.json", json.dumps(found))


def measure(rank: Rank, store: dist.Store, *, seconds: float, sizes: Sequence[int]) -> dict[str, Any]:
    """Return the link, the seconds of the slowest worker in each turn, and what was left out. Called by every worker.

    Raises WorkerFailed if a sum is wrong, and PeerLost if a worker is gone.
    """
    begin_s = time.perf_counter()
    say = _Progress(rank)
    say("the link between two workers")
    group = dist.new_group()
    wire = Wire(group)
    link = measure_links(wire, wire.hosts, seconds=min(_LINK_S, 0.2 * seconds)).inside
    assert link is not None, "all workers are on one host"
    shared, left_out = _shared(rank, store)
    try:
        sides = ways(group, shared, numel=max(sizes) // 4)
        say("every sum, checked")
        check_sums(sides, rank, sizes)
        times = take_turns(
            {size: {name: partial(side.all_reduce, size // 4) for name, side in sides.items()} for size in sizes},
            seconds=max(0.5 * seconds, seconds - (time.perf_counter() - begin_s)),
            wait=shared.barrier if shared is not None else dist.barrier,
            agree=first_says,
            say=lambda part: say(f"{100 * part:.0f}% of the turns"),
        )
    finally:
        if shared is not None:
            shared.close()
    return {"link": dataclasses.asdict(link), "seconds": slowest(times), "left_out": left_out}


def ways(group: dist.ProcessGroup, shared: SharedGroup | None, *, numel: int) -> dict[str, Side]:
    """Return every way to sum up to `numel` numbers, with memory of its own where it needs some.

    Called by every worker. Without `shared`, shared memory is left out; two-level is, where hosts of two or more
    workers cannot be pretended.
    """
    tensor, wire, hosts = torch.zeros(numel), Wire(group), two_hosts(group.size())
    made = {name: _of_messages(tensor, each, wire) for name, each in ALL_REDUCE.items() if name != "two-level"}
    if hosts:
        made["two-level"] = _of_messages(tensor, ALL_REDUCE["two-level"], Wire(group, hosts=hosts))
    if shared is not None:
        buffer = shared.buffer(numel, torch.float32)
        made["shared-memory"] = _of_tensor(tensor, shared.all_reduce)
        made["shared-in-place"] = Side(all_reduce=lambda count: buffer.all_reduce(0, count), place=buffer.tensor)
    made["Gloo"] = _of_tensor(tensor, dist.all_reduce)
    return made


def two_hosts(workers: int) -> list[str]:
    """Return the hosts that two-level takes the workers to be on: two, of the same number; or none where it cannot."""
    half = workers // 2
    return ["a"] * half + ["b"] * half if workers % 2 == 0 and half > 1 else []


def check_sums(sides: dict[str, Side], rank: Rank, sizes: Sequence[int]) -> None:
    """Sum every size by every side once, and leave zeros. Called by every worker; raises WorkerFailed if one is wrong.

    All numbers and sums are small and whole, so that they are exact in any order of adding.
    """
    own = numbers_of(rank.index, max(sizes) // 4)
    expected = sum((numbers_of(index, own.numel()) for index in range(rank.workers)), torch.zeros_like(own))
    for size in sizes:
        for name, side in sides.items():
            place = side.place[: size // 4]
            place.copy_(own[: place.numel()])
            side.all_reduce(place.numel())
            refuse_wrong_sum(place, expected[: place.numel()], name=name, rank=rank)
    for side in sides.values():
        side.place.zero_()


def numbers_of(index: int, numel: int) -> torch.Tensor:
    """Return what worker `index` gives to a sum that is checked."""
    return torch.arange(7 * index, 7 * index + numel, dtype=torch.int32).remainder_(_PERIOD).float()


def refuse_wrong_sum(found: torch.Tensor, expected: torch.Tensor, *, name: str, rank: Rank) -> None:
    """Raise WorkerFailed unless every number of `found` is the one expected."""
    if not torch.equal(found, expected):
        at = int((found != expected).nonzero()[0])
        raise WorkerFailed(
            f"{name} gave worker {rank.index} of {rank.workers} a wrong sum of {format_bytes(4 * found.numel())}: "
            f"number {at} is {found[at]:g}, not {expected[at]:g}."
        )


def first_says(value: int) -> int:
    """Return the value of worker 0. Called by every worker."""
    told = torch.tensor([value])
    dist.broadcast(told, 0)
    return int(told)


def slowest(times: Times) -> Times:
    """Return, for every turn, the seconds of the slowest worker. Called by every worker."""
    return {size: {name: _greatest(seconds) for name, seconds in row.items()} for size, row in times.items()}


def _greatest(values: list[float]) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    found: list[float] = tensor.tolist()
    return found


def _of_tensor(tensor: torch.Tensor, all_reduce: Callable[[torch.Tensor], Any]) -> Side:
    return Side(all_reduce=lambda count: all_reduce(tensor[:count]), place=tensor)


def _of_messages(tensor: torch.Tensor, all_reduce: AllReduce, wire: Wire) -> Side:
    return _of_tensor(tensor, lambda numbers: all_reduce(numbers, wire))


def _shared(rank: Rank, store: dist.Store) -> tuple[SharedGroup | None, list[str]]:
    try:
        return join(store, index=rank.index, count=rank.workers, timeout_s=_TIMEOUT_S), []
    except PlanError as error:  # another system than Linux
        return None, [f"Shared memory is left out: {error}"]


class _Progress:
    """Lines about how far worker 0 is, not too many."""

    def __init__(self, rank: Rank) -> None:
        self._is_first, self._said_s = rank.index == 0, 0.0

    def __call__(self, what: str) -> None:
        if self._is_first and time.monotonic() > self._said_s + _SAY_EVERY_S:
            self._said_s = time.monotonic()
            print(f"{PROGRESS}{what}", flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except ShoalError as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(error.exit_code)  # at once, so that the others learn of it

"""The links between workers, measured between two of them: one pair of one host, and one pair of two hosts.

1. A few messages of 8 bytes go to and fro. Half of a round is the latency: what a step of an algorithm costs, however
   little it sends, with all that the engine and Python add to it.
2. Both send each other ever more, until it takes a while: what each sends in that time is the rate, in one direction,
   while the other is as busy. So do the steps of an all-reduce.
3. All workers sum 8 bytes by recursive doubling, call after call, as training does. What a step takes beyond the
   latency, shared among its messages, is what a crowd costs: nearly nothing where every host has its own cores.
4. The first of the two keeps the time and says what comes next, so that both stop together; all workers then learn
   the figures by a sum in which everybody else has zeros.

Example: workers 0 and 1 on h1, 2 and 3 on h2. 0 and 1 measure the inside of a host in half a second, then 0 and 2
measure the link between hosts in another half, while the others wait for the sum.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from statistics import median

import torch

from shoal.comm.algorithms.recursive_doubling import all_reduce_steps, recursive_doubling
from shoal.comm.algorithms.run import run
from shoal.comm.algorithms.steps import Message, Step, Steps
from shoal.comm.algorithms.wire import Wire
from shoal.core.errors import ConfigError
from shoal.spec.device import Link

_ROUNDS = 8
"""Of messages to and fro, timed together."""
_LATENCY_SHARE = 0.2
_CROWD_SHARE = 0.1
"""The parts of the time that go to them, alone and in a crowd; the rest is for the rate."""
_FIRST_NUMEL, _LARGEST_NUMEL = 64 << 10, 64 << 20
"""Bytes of the first exchange and of the largest."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """What joins workers of one host, and of two hosts; None where no two workers stand so."""

    inside: Link | None = None
    between: Link | None = None


_UNKNOWN = Links()


def gather_hosts(wire: Wire, *, timeout_s: float, host: str | None = None) -> list[str]:
    """Return the host name of each worker. Called by every worker; `host` is this one's, by default its own name."""
    store = wire.store
    store.set(f"host {wire.index}", host or socket.gethostname())
    keys = [f"host {worker}" for worker in range(wire.count)]
    store.wait(keys, timedelta(seconds=timeout_s))
    return [name.decode() for name in store.multi_get(keys)]


def measure_links(wire: Wire, hosts: Sequence[str], *, seconds: float = 1.0, known: Links = _UNKNOWN) -> Links:
    """Return the links inside a host and between two, measured in about `seconds`; the same on all workers.

    Those that are `known` are left out. Called by every worker. If one is gone, raises PeerLost.
    """
    inside, between = _pairs(hosts)
    pairs = [inside if known.inside is None else None, between if known.between is None else None]
    figures = torch.zeros(5, dtype=torch.float64)
    for place, pair in enumerate(pairs):
        if pair is not None and wire.index in pair:
            other = pair[1] if wire.index == pair[0] else pair[0]
            link = measure_pair(wire, other, (1 - _CROWD_SHARE) * seconds / sum(each is not None for each in pairs))
            if wire.index == pair[0]:
                figures[2 * place], figures[2 * place + 1] = link.latency_s, link.bytes_per_s
    crowded_s = _crowded_s(wire, _CROWD_SHARE * seconds)
    figures[4] = crowded_s if wire.index == 0 else 0.0
    recursive_doubling(figures, wire)
    crowded_s = float(figures[4])
    made = [
        None if pair is None else _link(figures[2 * place : 2 * place + 2], [hosts[worker] for worker in pair])
        for place, pair in enumerate(pairs)
    ]
    return Links(inside=_in_crowd(made[0], crowded_s, wire.count), between=_in_crowd(made[1], crowded_s, wire.count))


def measure_pair(wire: Wire, other: int, seconds: float) -> Link:
    """Return the link between this worker and `other`, measured in about `seconds`; the same on both.

    Called by these two alone. If one is gone, the other raises PeerLost.
    """
    if other == wire.index:
        raise ConfigError(f"worker {other} has no link to itself: name another worker.")
    pair = wire.among(sorted((wire.index, other)))
    latency_s = _latency_s(pair, _LATENCY_SHARE * seconds)
    bytes_per_s = _bytes_per_s(pair, (1 - _LATENCY_SHARE) * seconds, latency_s)
    figures = torch.tensor([latency_s, bytes_per_s], dtype=torch.float64) * (pair.index == 0)
    recursive_doubling(figures, pair)
    return _link(figures, pair.hosts)


def _link(figures: torch.Tensor, hosts: Sequence[str]) -> Link:
    latency_s, bytes_per_s = figures.tolist()
    where = f"inside {hosts[0]}" if hosts[0] == hosts[1] else f"between {' and '.join(sorted(hosts))}"
    # What stays inside a host is carried by the cores that compute.
    overlaps = hosts[0] != hosts[1]
    return Link(source=f"measured {where}", bytes_per_s=bytes_per_s, latency_s=latency_s, overlaps=overlaps)


def _pairs(hosts: Sequence[str]) -> list[tuple[int, int] | None]:
    """Return the first two workers of one host, and the first two of different hosts."""
    every = [(low, high) for low in range(len(hosts)) for high in range(low + 1, len(hosts))]
    inside = next(((low, high) for low, high in every if hosts[low] == hosts[high]), None)
    return [inside, next(((low, high) for low, high in every if hosts[low] != hosts[high]), None)]


def _in_crowd(link: Link | None, crowded_s: float, workers: int) -> Link | None:
    """Return `link` with what a crowd costs, where all `workers` exchanging at once take `crowded_s`."""
    if link is None:
        return None
    return replace(link, crowd_s=max(0.0, crowded_s - link.latency_s) / (workers - 1))


def _crowded_s(wire: Wire, seconds: float) -> float:
    """Return the time of a step in which all workers send small messages. What worker 0 returns counts.

    Call after call, each with all that a call costs: inside one long run nobody ever falls asleep, and a crowd of
    sleepers that must be woken one by one costs three times as much.
    """
    if wire.count == 1:
        return 0.0

    def calls(message: torch.Tensor) -> None:
        for _ in range(_ROUNDS):
            recursive_doubling(message, wire)

    return _median_s(calls, wire, seconds) / (_ROUNDS * len(all_reduce_steps(0, wire.count, 1)))


def _latency_s(pair: Wire, seconds: float) -> float:
    """Return half the time of a message to and fro. What worker 0 returns counts."""
    return _median_s(lambda message: run(_to_and_fro, message, pair), pair, seconds) / (2 * _ROUNDS)


def _median_s(call: Callable[[torch.Tensor], None], wire: Wire, seconds: float) -> float:
    """Return what `call` with 8 bytes takes, the median of those of `seconds`, three at least."""
    message, times = torch.zeros(1, dtype=torch.int64), list[float]()
    call(message)
    end_s = time.perf_counter() + seconds
    while True:
        begin_s = time.perf_counter()
        call(message)
        times.append(time.perf_counter() - begin_s)
        if not _agreed(int(begin_s < end_s or len(times) < 3), wire):
            return median(times)


def _bytes_per_s(pair: Wire, seconds: float, latency_s: float) -> float:
    """Return what each of two sends in a second while both do. What worker 0 returns counts."""
    numel, rates, end_s = _FIRST_NUMEL, list[float](), time.perf_counter() + seconds
    while numel:
        data = torch.zeros(numel, dtype=torch.uint8)
        begin_s = time.perf_counter()
        run(_both_ways, data, pair)
        took_s = time.perf_counter() - begin_s
        rates.append(numel / max(took_s - latency_s, took_s / 2))
        left_s = end_s - time.perf_counter()
        largest = min(_LARGEST_NUMEL, int(rates[-1] * left_s))
        # Four times as much while that takes less than half of what is left; the last ones are the ones that count.
        following = 4 * numel if 4 * numel <= largest // 2 else (numel if numel <= largest else 0)
        numel = _agreed(following, pair)
    largest_of = rates[-3:]  # of the same size, mostly, and past the start, when a connection is still slow
    return median(largest_of)


def _agreed(value: int, wire: Wire) -> int:
    """Return the value of worker 0."""
    tensor = torch.tensor([value if wire.index == 0 else 0])
    recursive_doubling(tensor, wire)
    return int(tensor.item())


def _to_and_fro(index: int, _count: int, numel: int) -> Steps:
    message = (Message(1 - index, 0, numel),)
    turns = [Step(sends=message), Step(receives=message)]
    return (turns if index == 0 else turns[::-1]) * _ROUNDS


def _both_ways(index: int, _count: int, numel: int) -> Steps:
    message = Message(1 - index, 0, numel)
    return [Step((message,), (Message(1 - index, 0, numel, True),))]

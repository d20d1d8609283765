"""How long work takes on a device, measured round by round so that a disturbance falls on everything alike.

1. Each probe is called once to warm up, and once more to find how often it fits into its share of the time.
2. Then all probes take turns, some rounds long; before each, whoever measures at the same time is waited for.
3. The mean of the faster half of a probe's rounds counts. On a processor, time in which this thread was ready to
   run and another process had the core is taken off.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.core.fit import typical

ROUNDS = 8
_SCHEDSTAT = Path("/proc/thread-self/schedstat")
"""Three numbers (Linux, sched-stats): nanoseconds on a core, nanoseconds waiting for one, and how often it ran."""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Something to measure."""

    name: str
    work: Callable[[], object]
    amount: float
    """What one call of `work` does, in operations or bytes."""


def measure(
    probes: Sequence[Probe],
    *,
    device: torch.device,
    seconds: float,
    rounds: int = ROUNDS,
    together: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Return the seconds that each probe takes for one unit of its amount, in about `seconds` altogether.

    `together` is called before each turn. Where several workers measure, it waits for all of them, so that each
    rate is what a worker has while the others do the same.
    """
    turn_s = seconds / (rounds * len(probes))
    calls = {}
    for probe in probes:
        together()
        seconds_of(probe.work, calls=1, device=device)
        calls[probe.name] = max(1, round(turn_s / seconds_of(probe.work, calls=1, device=device)))
    found: dict[str, list[float]] = {probe.name: [] for probe in probes}
    for _ in range(rounds):
        for probe in probes:
            together()
            taken_s = seconds_of(probe.work, calls=calls[probe.name], device=device)
            found[probe.name].append(taken_s / probe.amount)
    return {name: typical(values) for name, values in found.items()}


def seconds_of(work: Callable[[], object], *, calls: int, device: torch.device) -> float:
    """Return the seconds of one call of `work` among `calls` in a row, on the device's own clock."""
    if device.type != "cuda":
        # The clock outside, the wait inside: a wait between two reads then lengthens the time, and never hides work.
        begin_s = time.perf_counter()
        waited_s = _waited_s()
        for _ in range(calls):
            work()
        waited_s = _waited_s() - waited_s
        return (time.perf_counter() - begin_s - waited_s) / calls
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / calls


def _waited_s() -> float:
    """Return how long this thread has waited for a core so far, where the kernel tells."""
    try:
        return int(_SCHEDSTAT.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0

"""Sides of a comparison that take turns, at several sizes, until the time is up. Without torch, for MPI's workers.

1. Each side is called a few times at each size, to know how many calls make a turn of about `TURN_S`.
2. The size that has had the least time goes next: each of its sides has one turn, in an order that is turned round
   every time. So all sides of a size see the same moods of the machine, and large sizes do not starve the small ones.
3. When the time is up, and every size has had `LEAST_ROUNDS`, it ends. The first worker decides, all others follow.

Example: 4 KB takes 9 sides 40 ms a round, 64 MB 2 s. In 12 s, 64 MB has 3 rounds, and 4 KB about 150.
"""

import time
from collections.abc import Callable, Mapping

TURN_S = 0.004
"""Long beside what a barrier leaves workers apart (0.1 ms), short beside the moods of a machine."""
LEAST_ROUNDS = 3
PROGRESS = "progress: "
"""How the lines begin that a worker prints for whoever looks on."""
_MOST_CALLS = 1000

Sides = Mapping[int, Mapping[str, Callable[[], None]]]
"""By size in bytes and by name: one call of a side at that size."""
Times = dict[int, dict[str, list[float]]]
"""By size and name: the seconds of one call, in each round."""


def take_turns(
    sides: Sides,
    *,
    seconds: float,
    wait: Callable[[], None],
    agree: Callable[[int], int],
    say: Callable[[float], None],
) -> Times:
    """Return what each side took on this worker. Called by every worker, with the same sides.

    `wait` returns when all workers have called it, `agree` returns the first worker's value, and `say` is told which
    part of the time is over.
    """
    calls = {size: {name: agree(_calls_of(side, wait)) for name, side in row.items()} for size, row in sides.items()}
    times: Times = {size: {name: [] for name in row} for size, row in sides.items()}
    spent_s, rounds = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0)
    while size := agree(_next_size(spent_s, rounds, seconds)):
        begin_s = time.perf_counter()
        for name in list(sides[size]) if rounds[size] % 2 == 0 else reversed(list(sides[size])):
            times[size][name].append(_turn_s(sides[size][name], calls[size][name], wait))
        spent_s[size] += time.perf_counter() - begin_s
        rounds[size] += 1
        say(min(1.0, sum(spent_s.values()) / seconds))
    return times


def _next_size(spent_s: Mapping[int, float], rounds: Mapping[int, int], seconds: float) -> int:
    """Return the size whose turn it is, or 0 at the end."""
    short = [size for size in rounds if rounds[size] < LEAST_ROUNDS]
    if sum(spent_s.values()) >= seconds:
        return short[0] if short else 0
    return min(spent_s, key=lambda size: spent_s[size])


def _calls_of(side: Callable[[], None], wait: Callable[[], None]) -> int:
    return min(_MOST_CALLS, max(1, round(TURN_S / _turn_s(side, 2, wait))))


def _turn_s(side: Callable[[], None], calls: int, wait: Callable[[], None]) -> float:
    """Return the seconds of one of `calls` calls, begun by all workers together."""
    wait()
    begin_s = time.perf_counter()
    for _ in range(calls):
        side()
    return (time.perf_counter() - begin_s) / calls

"""What an all-reduce costs where workers share the cores that send: the closed forms, with a price for each message.

Two workers exchange a small message in `latency_s`. Where all exchange at once, hosts with cores of their own need no
longer, but workers that outnumber the cores wait for each other: each further message of the step adds `crowd_s`. Bytes
travel meanwhile, so that a step of m messages of n bytes takes

    latency_s + max(n / bytes_per_s, (m - 1) crowd_s)

and another small message's time before it, if the step before was large and came from other workers: these send only
when told where to (comm/algorithms/run.py). But for that, with crowd_s = 0, these are the closed forms of allreduce.py.

Example: 4 workers on 2 cores, 0.1 ms, 0.2 ms a message. 4 KB by recursive doubling are 2 steps of 4 messages, 1.4 ms;
by a tree 4 steps of 2, 1, 1 and 2 messages, 0.8 ms: more steps, but fewer messages.
"""

from collections.abc import Callable
from typing import NamedTuple

from shoal.planner.collectives.allreduce import Cost
from shoal.spec.communication import EARLY_BYTES
from shoal.spec.device import Link


class Step(NamedTuple):
    """Messages that travel at the same time, of so many bytes each."""

    messages: int
    num_bytes: float
    moves: bool = True
    """Whether they come from other workers than in the step before."""


def _naive(num_bytes: float, workers: int) -> list[Step]:
    return [Step(1, num_bytes)] * (2 * (workers - 1))


def _tree(num_bytes: float, workers: int) -> list[Step]:
    up, reach = [], 1
    while reach < workers:
        up.append(Step(-(-(workers - reach) // (2 * reach)), num_bytes))
        reach *= 2
    return up + up[::-1]


def _ring(num_bytes: float, workers: int) -> list[Step]:
    return [Step(workers, num_bytes / workers, moves=False)] * (2 * (workers - 1))


def _halving_doubling(num_bytes: float, workers: int) -> list[Step]:
    half, parts = [], workers
    while parts > 1:
        near = (parts + 1) // 2
        half.append(Step(workers, (parts - near) / workers * num_bytes))
        parts = near
    return half + half[::-1]


def _recursive_doubling(num_bytes: float, workers: int) -> list[Step]:
    core = 1 << (workers.bit_length() - 1)
    fold = [Step(workers - core, num_bytes)] if core < workers else []
    return fold + [Step(core, num_bytes)] * (core.bit_length() - 1) + fold


STEPS: dict[str, Callable[[float, int], list[Step]]] = {
    "naive": _naive,
    "tree": _tree,
    "ring": _ring,
    "halving-doubling": _halving_doubling,
    "recursive-doubling": _recursive_doubling,
}
"""The all-reduces that know no hosts, as steps of messages."""


def crowded(name: str, num_bytes: float, workers: int, link: Link) -> Cost:
    """Return what the all-reduce `name` costs on `link`, whose workers may share cores."""
    steps = STEPS[name](num_bytes, workers)
    seconds = 0.0
    for before, step in zip([None, *steps], steps, strict=False):
        crowd_s = (step.messages - 1) * link.crowd_s
        seconds += link.latency_s + max(step.num_bytes / link.bytes_per_s, crowd_s)
        if before is not None and step.moves and before.num_bytes > EARLY_BYTES:
            seconds += link.latency_s + crowd_s
    sent_bytes = sum(step.num_bytes for step in steps)
    return Cost(len(steps), sent_bytes, seconds)

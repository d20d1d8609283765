"""Along a binomial tree: a reduce from the leaves to the root, a broadcast from the root, and both for an all-reduce.

Workers are counted from the root on. With k the lowest bit that is set in a worker's number (for the root: all of
them), its parent is the number without bit k, its children are the number plus each smaller bit.

1. Reduce: a worker adds what its children send, nearest first, and sends the sum to its parent.
2. Broadcast: a worker receives from its parent and sends to its children, farthest first: these have most to pass on.

Example: 6 workers, root 0: its children are 1, 2 and 4; 3 is 2's child and 5 is 4's. Three steps each way.
"""

from functools import lru_cache, partial

from torch import Tensor

from shoal.comm.algorithms.run import run
from shoal.comm.algorithms.steps import Message, Schedule, Step, Steps
from shoal.comm.algorithms.wire import Wire


def tree(tensor: Tensor, wire: Wire) -> None:
    """Sum `tensor` over all workers, in place. Called by every worker; if one is gone, raises PeerLost."""
    run(all_reduce_steps, tensor, wire)


def reduce(tensor: Tensor, wire: Wire, *, to: int = 0) -> None:
    """Put the sum of all workers' `tensor` into that of worker `to`; on the others it is then undefined.

    Called by every worker; if one is gone, those that need it raise PeerLost.
    """
    run(reduce_to(to), tensor, wire)


def all_reduce_steps(index: int, count: int, numel: int) -> Steps:
    """Return a reduce to worker 0 and a broadcast from it."""
    return reduce_steps(index, count, numel, to=0) + broadcast_steps(index, count, numel, source=0)


def reduce_steps(index: int, count: int, numel: int, *, to: int) -> Steps:
    """Return the steps of worker `index` that sum at worker `to`."""
    parent, children = _family(index, count, root=to)
    made = [Step(receives=(Message(child, 0, numel, True),)) for child in children]
    return made + ([Step(sends=(Message(parent, 0, numel),))] if parent is not None else [])


def broadcast_steps(index: int, count: int, numel: int, *, source: int) -> Steps:
    """Return the steps of worker `index` that spread what `source` has."""
    parent, children = _family(index, count, root=source)
    made = [Step(receives=(Message(parent, 0, numel),))] if parent is not None else []
    return made + [Step(sends=(Message(child, 0, numel),)) for child in reversed(children)]


@lru_cache  # one object for each, by which `compiled` remembers it
def reduce_to(to: int) -> Schedule:
    """Return the schedule of a reduce to worker `to`."""
    return partial(reduce_steps, to=to)


@lru_cache
def broadcast_from(source: int) -> Schedule:
    """Return the schedule of a broadcast from worker `source`."""
    return partial(broadcast_steps, source=source)


def _family(index: int, count: int, *, root: int) -> tuple[int | None, list[int]]:
    """Return the parent of worker `index` (none for the root) and its children, nearest first."""
    number, bit, children = (index - root) % count, 1, []
    while bit < count and not number & bit:
        if number + bit < count:
            children.append((number + bit + root) % count)
        bit *= 2
    return (None if number == 0 else (number - bit + root) % count), children

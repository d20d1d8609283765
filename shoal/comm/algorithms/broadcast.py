"""What one worker has, given to all, and the receipts: each worker acknowledges, and the source can ask who has it.

1. The bytes go by `tree` (binomial; few steps), or along a `chain` (each sends on to the next what it has got so far,
   piece by piece: for large messages about as fast as one alone).
2. A worker that has all of it writes a receipt into the group's store. It does not wait for anybody.
3. The source asks the store. That works whoever is dead by then, and while the workers do other things.

Example: 3 workers, a chain, 64 MB in pieces of 512 KB: worker 2 gets its first piece when worker 1 gets its second. If
worker 2 is killed half way, the source's `receipts.missing()` is {2} and `receipts.has(1)` is True.
"""

from functools import lru_cache, partial

from torch import Tensor

from shoal.comm.algorithms.receipts import Receipts, acknowledge, count_broadcast
from shoal.comm.algorithms.run import run
from shoal.comm.algorithms.steps import Message, Schedule, Step, Steps
from shoal.comm.algorithms.tree import broadcast_from
from shoal.comm.algorithms.wire import Wire


def broadcast(tensor: Tensor, wire: Wire, *, source: int = 0, algorithm: str = "tree") -> Receipts:
    """Put what worker `source` has in `tensor` into that of every worker, and return the receipts.

    Called by every worker. Returns when this worker has its copy and has passed it on. If a worker is gone, those
    that need it raise PeerLost, and their `tensor` is undefined; `wire.receipts` still tells the source who has it.
    """
    store = wire.store
    number = count_broadcast(store, worker=wire.index)
    others = set(range(wire.count)) - {source} if wire.index == source else set()
    receipts = Receipts(store, number=number, source=source, workers=others)
    wire.receipts = receipts
    run(BROADCAST[algorithm](source), tensor, wire)
    if wire.index != source:
        wire.await_stream(tensor)
        acknowledge(store, number=number, worker=wire.index)
    return receipts


def chain_steps(index: int, count: int, numel: int, *, source: int) -> Steps:
    """Return the steps of worker `index` in a chain that begins at `source`."""
    number = (index - source) % count
    made = [Step(receives=(Message((index - 1) % count, 0, numel),))] if number > 0 else []
    return made + ([Step(sends=(Message((index + 1) % count, 0, numel),))] if number < count - 1 else [])


@lru_cache  # one object for each, by which `compiled` remembers it
def chain_from(source: int) -> Schedule:
    """Return the schedule of a chain that begins at worker `source`."""
    return partial(chain_steps, source=source)


BROADCAST = {"tree": broadcast_from, "chain": chain_from}

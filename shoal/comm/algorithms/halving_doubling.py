"""By halves: the fewest steps at which no byte is sent twice, for any number of workers.

The parts of the numbers, one a worker, stand in a circle; worker i counts them from its own on. The distances come from
halving p, rounded up, down to 1: 7, 4, 2, 1.

1. Reduce-scatter, ceil(log2 p) steps: from distance d to the next, e, worker i sends the parts e ... d-1 (its count) to
   worker i + e, who counts them 0 ... d-e-1 and adds them. What a worker has beyond e is then no longer needed.
2. All-gather, the same backwards: parts 0 ... d-e-1 go to worker i - e, who counts them e ... d-1.

So (p-1)/p of the bytes leave each worker in either half, in ceil(log2 p) steps: the bytes of a ring in the time of a
tree. Where p is a power of two this is recursive halving and doubling with other partners; where it is not, nobody is
folded in first. (Circulant graphs: Bruck et al. 1997 for the all-gather, Traff 2024 for the reduce-scatter.)

Example: p = 3, distances 3, 2, 1. Worker 0 sends part 2 to worker 2 and adds part 0 of worker 1; then sends part 1 to
worker 1 and adds part 0 of worker 2: two steps, a third of the bytes in each.
"""

from dataclasses import replace

from torch import Tensor

from shoal.comm.algorithms.run import run
from shoal.comm.algorithms.steps import Message, Step, Steps, spans
from shoal.comm.algorithms.wire import Wire


def halving_doubling(tensor: Tensor, wire: Wire) -> None:
    """Sum `tensor` over all workers, in place. Called by every worker; if one is gone, raises PeerLost."""
    run(all_reduce_steps, tensor, wire)


def halving_reduce_scatter(tensor: Tensor, wire: Wire) -> None:
    """Put the sum of part `wire.index` of `tensor` in its place; the other parts are then undefined.

    Parts are those of `steps.part`. Called by every worker; if one is gone, raises PeerLost.
    """
    run(reduce_scatter_steps, tensor, wire)


def doubling_all_gather(tensor: Tensor, wire: Wire) -> None:
    """Put part k of worker k's `tensor` in its place, for every k. Called by every worker; see above."""
    run(all_gather_steps, tensor, wire)


def all_reduce_steps(index: int, count: int, numel: int) -> Steps:
    """Return both halves."""
    return reduce_scatter_steps(index, count, numel) + all_gather_steps(index, count, numel)


def reduce_scatter_steps(index: int, count: int, numel: int) -> Steps:
    """Return the first half."""
    made = []
    for distance, near in _halvings(count):
        after, before = (index + near) % count, (index - near) % count
        sent = [Message(after, *span) for span in spans(numel, after, distance - near, count)]
        received = [Message(before, *span, True) for span in spans(numel, index, distance - near, count)]
        made.append(Step(tuple(sent), tuple(received)))
    return made


def all_gather_steps(index: int, count: int, numel: int) -> Steps:
    """Return the second half: the first backwards, where what was sent comes back and takes its place."""
    first = reduce_scatter_steps(index, count, numel)
    return [Step(tuple(replace(m, adds=False) for m in step.receives), step.sends) for step in reversed(first)]


def _halvings(count: int) -> list[tuple[int, int]]:
    """Return each distance with the next: 7 -> (7, 4), (4, 2), (2, 1)."""
    pairs = []
    while count > 1:
        pairs.append((count, (count + 1) // 2))
        count = (count + 1) // 2
    return pairs

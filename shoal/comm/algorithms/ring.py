"""Around a ring: each worker sends to the next and receives from the one before, a p-th of the numbers at a time.

1. Reduce-scatter, p - 1 steps: in step s worker i sends part i - s - 1 and adds part i - s - 2 to its own. After the
   last one it has the whole sum of part i.
2. All-gather, p - 1 steps: in step s it sends part i - s and receives part i - s - 1.

All numbers are modulo p. Each worker sends (p-1)/p of the bytes in either half, whatever p is: no algorithm sends less.
Example: 3 workers. Worker 0 sends part 2, gets part 1 of worker 2 and adds it, sends that on, gets part 0: the sum of
worker 2's and worker 1's, adds its own, and has the sum of part 0.
"""

from torch import Tensor

from shoal.comm.algorithms.run import run
from shoal.comm.algorithms.steps import Message, Step, Steps, part
from shoal.comm.algorithms.wire import Wire


def ring(tensor: Tensor, wire: Wire) -> None:
    """Sum `tensor` over all workers, in place. Called by every worker; if one is gone, raises PeerLost."""
    run(all_reduce_steps, tensor, wire)


def ring_reduce_scatter(tensor: Tensor, wire: Wire) -> None:
    """Put the sum of part `wire.index` of `tensor` in its place; the other parts are then undefined.

    Parts are those of `steps.part`. Called by every worker; if one is gone, raises PeerLost.
    """
    run(reduce_scatter_steps, tensor, wire)


def ring_all_gather(tensor: Tensor, wire: Wire) -> None:
    """Put part k of worker k's `tensor` in its place, for every k. Called by every worker; see above."""
    run(all_gather_steps, tensor, wire)


def all_reduce_steps(index: int, count: int, numel: int) -> Steps:
    """Return both halves."""
    return reduce_scatter_steps(index, count, numel) + all_gather_steps(index, count, numel)


def reduce_scatter_steps(index: int, count: int, numel: int) -> Steps:
    """Return the first half."""
    return [_step(index, count, numel, sends=index - step - 1, adds=True) for step in range(count - 1)]


def all_gather_steps(index: int, count: int, numel: int) -> Steps:
    """Return the second half."""
    return [_step(index, count, numel, sends=index - step, adds=False) for step in range(count - 1)]


def _step(index: int, count: int, numel: int, *, sends: int, adds: bool) -> Step:
    sent = Message((index + 1) % count, *part(numel, sends % count, count))
    received = Message((index - 1) % count, *part(numel, (sends - 1) % count, count), adds)
    return Step((sent,), (received,))

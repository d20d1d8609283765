"""By exchange of everything: the fewest steps there can be, for messages so small that only their number counts.

With q the largest power of two that is <= p:

1. Worker q + k sends all it has to worker k, who adds it.
2. log2 q steps: workers below q exchange all they have with the worker 1, 2, 4 ... away, and add.
3. Worker k sends the sum to worker q + k.

Two who exchange add the same two values, the lower worker's first: all end with the same bits.
Example: p = 3: worker 2 sends to 0; 0 and 1 exchange; 0 sends the sum to 2.
"""

from torch import Tensor

from shoal.comm.algorithms.run import run
from shoal.comm.algorithms.steps import Message, Step, Steps
from shoal.comm.algorithms.wire import Wire


def recursive_doubling(tensor: Tensor, wire: Wire) -> None:
    """Sum `tensor` over all workers, in place. Called by every worker; if one is gone, raises PeerLost."""
    run(all_reduce_steps, tensor, wire)


def all_reduce_steps(index: int, count: int, numel: int) -> Steps:
    """Return the steps of worker `index`."""
    core = 1 << (count.bit_length() - 1)
    if index >= core:
        other = index - core
        return [Step(sends=(Message(other, 0, numel),)), Step(receives=(Message(other, 0, numel),))]
    made = []
    if index + core < count:
        made.append(Step(receives=(Message(index + core, 0, numel, True),)))
    distance = 1
    while distance < core:
        other = index ^ distance
        made.append(Step((Message(other, 0, numel),), (Message(other, 0, numel, True),)))
        distance *= 2
    if index + core < count:
        made.append(Step(sends=(Message(index + core, 0, numel),)))
    return made

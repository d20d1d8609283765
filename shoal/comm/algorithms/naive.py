"""All to one: worker 0 receives from each of the others in turn, adds, and sends the sum to each in turn.

Example: 4 workers, 1 MB: 3 MB reach worker 0 and 3 MB leave it, while the others' links idle.
"""

from torch import Tensor

from shoal.comm.algorithms.run import run
from shoal.comm.algorithms.steps import Message, Step, Steps
from shoal.comm.algorithms.wire import Wire


def naive(tensor: Tensor, wire: Wire) -> None:
    """Sum `tensor` over all workers, in place. Called by every worker; if one is gone, raises PeerLost."""
    run(all_reduce_steps, tensor, wire)


def all_reduce_steps(index: int, count: int, numel: int) -> Steps:
    """Return the steps of worker `index`."""
    if index > 0:
        return [Step(sends=(Message(0, 0, numel),)), Step(receives=(Message(0, 0, numel),))]
    others = range(1, count)
    receives = [Step(receives=(Message(other, 0, numel, True),)) for other in others]
    return receives + [Step(sends=(Message(other, 0, numel),)) for other in others]

"""Collectives over point-to-point messages, one algorithm a file; planner/collectives has what each should cost.

All are called by every worker of a `Wire` with tensors of one shape, work in place, and leave the same bits on every
worker, whoever was early or late. If a worker is gone they raise PeerLost, and the tensor is undefined.
"""

from shoal.comm.algorithms.broadcast import BROADCAST, broadcast
from shoal.comm.algorithms.halving_doubling import doubling_all_gather, halving_doubling, halving_reduce_scatter
from shoal.comm.algorithms.naive import naive
from shoal.comm.algorithms.receipts import Receipts
from shoal.comm.algorithms.recursive_doubling import recursive_doubling
from shoal.comm.algorithms.ring import ring, ring_all_gather, ring_reduce_scatter
from shoal.comm.algorithms.tree import reduce, tree
from shoal.comm.algorithms.two_level import AllReduce, Inside, two_level, two_level_with
from shoal.comm.algorithms.wire import Wire

ALL_REDUCE: dict[str, AllReduce] = {
    "naive": naive,
    "tree": tree,
    "ring": ring,
    "halving-doubling": halving_doubling,
    "recursive-doubling": recursive_doubling,
    "two-level": two_level,
}
"""By the names that planner/collectives/allreduce.py gives them."""

REDUCE_SCATTER: dict[str, AllReduce] = {"ring": ring_reduce_scatter, "halving": halving_reduce_scatter}
ALL_GATHER: dict[str, AllReduce] = {"ring": ring_all_gather, "doubling": doubling_all_gather}

__all__ = [
    "ALL_GATHER",
    "ALL_REDUCE",
    "BROADCAST",
    "REDUCE_SCATTER",
    "Inside",
    "Receipts",
    "Wire",
    "broadcast",
    "reduce",
    "two_level",
    "two_level_with",
]

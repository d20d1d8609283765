"""What workers of the pool do while faults strike."""

import torch
from torch.distributed import Store

from shoal.comm.failure import is_peer_failure
from shoal.comm.group import all_reduce_sum, joined
from shoal.comm.rank import Rank
from shoal.comm.store import connect
from shoal.fault import inject
from shoal.fault.inject import Fault


def exchange_until_cut(rank: Rank, *, faults: list[Fault]) -> tuple[int, bool, bool]:
    """Exchange until that fails; return the last good step, whether it failed as a lost peer does, and of the store."""
    inject.begin(rank.index, faults)
    store = connect(rank, timeout_s=20)
    done, is_peer = 0, False
    try:
        with joined(rank, store, device=torch.device("cpu"), timeout_s=20):
            for step in range(1, 6):
                inject.at("step begins", step)
                all_reduce_sum(torch.ones(4)).wait()
                done = step
    except RuntimeError as error:
        is_peer = is_peer_failure(error)
    finally:
        inject.end()
    return done, is_peer, _answers(store)


def _answers(store: Store) -> bool:
    try:
        store.check(["anything"])
    except RuntimeError:
        return False
    return True

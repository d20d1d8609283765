"""Workers of the pool as if torchrun had started them."""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from shoal.comm.rank import Rank


@contextmanager
def as_torchrun(rank: Rank) -> Iterator[None]:
    """Set the variables that torchrun sets for the length of a `with` block, in which warnings are nobody's errors."""
    names = {
        "RANK": rank.index, "WORLD_SIZE": rank.workers, "LOCAL_RANK": rank.local_index,
        "LOCAL_WORLD_SIZE": rank.local_workers, "GROUP_RANK": 0, "MASTER_ADDR": rank.store_host,
        "MASTER_PORT": rank.store_port, "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    before = dict(os.environ)
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's libraries warn of this and that
            yield
    finally:
        os.environ.clear()
        os.environ.update(before)

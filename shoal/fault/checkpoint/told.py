"""What workers tell each other in the store, waited for as long as all of them live."""

import time
from collections.abc import Callable, Sequence

from torch.distributed import Store

from shoal.core.errors import PeerLost

_MOST_PAUSE_S = 0.05


def told(store: Store, keys: Sequence[str], *, timeout_s: float, check: Callable[[], None] = lambda: None) -> list[str]:
    """Return what stands in the store under `keys`, as soon as all are there.

    `check` is called while this waits: it raises if that is in vain. After `timeout_s` that is PeerLost.
    """
    end_s, pause_s = time.monotonic() + timeout_s, 1e-3
    while not store.check(list(keys)):
        check()
        if time.monotonic() > end_s:
            missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
            raise PeerLost(f"nothing was heard for {timeout_s:g} s of {', '.join(map(_who, missing))}")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
    return [value.decode() for value in store.multi_get(list(keys))]


def _who(key: str) -> str:
    return f"worker {key if key.isdecimal() else 0}"  # other words are worker 0's

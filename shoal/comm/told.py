"""What workers tell each other in the store, waited for as long as all of them live."""

import time
from collections.abc import Callable, Sequence

from torch.distributed import Store

from shoal.comm.calls import CALLS
from shoal.core.errors import PeerLost

_MOST_PAUSE_S = 0.05


def told(store: Store, keys: Sequence[str], *, timeout_s: float, check: Callable[[], None] = CALLS.check) -> list[str]:
    """Return what stands in the store under `keys`, as soon as all are there.

    `check` is called while this waits: it raises if that is in vain. After `timeout_s` that is PeerLost.
    """
    missing = not_told(store, keys, timeout_s=timeout_s, check=check)
    if missing:
        names = [key.rpartition("/")[2] for key in missing]
        raise PeerLost(f"nothing was heard for {timeout_s:g} s of {', '.join(map(_who, names))}")
    return [value.decode() for value in store.multi_get(list(keys))]


def not_told(
    store: Store, keys: Sequence[str], *, timeout_s: float, check: Callable[[], None] = CALLS.check
) -> list[str]:
    """Return those of `keys` that are not in the store after `timeout_s`; nothing as soon as all are there.

    By looking: a wait in the store could not be told that somebody is lost. `check` is as for `told`.
    """
    end_s, pause_s = time.monotonic() + timeout_s, 1e-3
    while not store.check(list(keys)):
        check()
        if time.monotonic() > end_s:
            return [key for key in keys if not store.check([key])]
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MOST_PAUSE_S)
    return []


def _who(key: str) -> str:
    return f"worker {key if key.isdecimal() else 0}"  # other words are worker 0's

"""The board on which workers say that they are ready, and on which the list of each step is closed once for all.

It is in the rendezvous store: one key for each worker, with the last it was ready for, and one with the last list. A
list is closed by replacing the one before it (compare and set), so of several who try, one succeeds, and whoever was
stopped meanwhile and tries with an old one does not. However many steps there are, the store holds no more than that.

A worker that takes part in a step cannot have gone on before all on its list have seen it, since it needs their
gradients: so nobody who is listed ever finds that list replaced.

Example: the list is that of step 6; workers 0 and 2 are ready for step 7, and both see that it may be closed. Worker
2's [7, {0, 2}] replaces it first. Worker 0 gets that back for its own try, and takes part in it.
"""

import time
from collections.abc import Callable

from torch.distributed import Store

from shoal.comm.alive import Watch
from shoal.comm.calls import CALLS
from shoal.comm.rank import Rank
from shoal.core.errors import PeerLost
from shoal.sync.deadline.listing import Listed, Ready, listed_text, read_listed, read_ready, ready_text

_LIST = "list"
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-4, 5e-3
_NEVER = "null"


class Board:
    """One worker's view of it."""

    def __init__(self, store: Store, rank: Rank, *, watch: Watch | None, timeout_s: float) -> None:
        self.index, self.workers = rank.index, rank.workers
        self._store, self._rank, self._watch, self._timeout_s = store, rank, watch, timeout_s
        self._keys = [_ready_key(worker) for worker in range(rank.workers)]
        self._text = b""

    def open(self, done: int) -> None:
        """Have it begin after step `done`, and wait until all workers are here. Called by every worker."""
        self._store.set(_ready_key(self.index), _NEVER)
        self._store.compare_set(_LIST, "", listed_text(Listed(done, is_boundary=True)))

        def missing() -> list[int]:
            return [worker for worker, key in enumerate(self._keys) if not self._store.check([key])]

        self.wait_until(lambda: not missing(), "the first step", missing=missing)

    def say(self, ready: Ready) -> None:
        """Say that this worker is ready."""
        self._store.set(_ready_key(self.index), ready_text(ready))

    def look(self) -> tuple[Listed, list[Ready]]:
        """Return the last list, and who is ready for the step after it, by their indices; PeerLost if one is lost."""
        if self._watch is not None:
            self._watch.check()
        self._text, *texts = self._store.multi_get([_LIST, *self._keys])
        listed = read_listed(self._text)
        ready = [one for text in texts if (one := read_ready(text)) is not None]
        return listed, [one for one in ready if one.step == listed.step + 1]

    def close(self, listed: Listed) -> None:
        """Replace the list that was last looked at, if nobody else has done so since."""
        self._store.compare_set(_LIST, self._text.decode(), listed_text(listed))

    def wait_until(self, is_so: Callable[[], bool], what: str, *, missing: Callable[[], list[int]]) -> None:
        """Return once `is_so`; raise PeerLost if a worker is lost meanwhile, or if it takes too long."""
        end_s, pause_s = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        with CALLS.waiting_in(what):
            while not is_so():
                if self._watch is not None:
                    self._watch.check()
                if time.monotonic() > end_s:
                    names = " and ".join(f"worker {self._rank.number_of(worker)}" for worker in missing()) or "nobody"
                    raise PeerLost(f"{names} did not come to {what} within {self._timeout_s:g} s.")
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)


def _ready_key(worker: int) -> str:
    return f"ready {worker}"

"""What a member hears while it trains: that its generation is over, or that somebody waits to be let in.

1. A thread of each member waits in the store for the next piece of news of its generation (comm/members.py). Nothing is
   asked, and nothing is done for it in a step.
2. "Over": a member is dead, or has lost somebody. Whatever the main thread waits in is made to fail at once: operations
   of the engine, waits in shared memory, waits in the store.
3. If the main thread is not released within `let_go_s` nevertheless, as from Gloo in the middle of a message, this
   process ends itself: it is then one more that is lost, and replaced.
4. "Waits": the members leave their generation after the same step, as they stop after the same step when asked to
   (fault/preempt.py): each that has heard of it counts itself, and the first that ends a step k with all counted
   decides that all leave after step k + `ahead`.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from shoal.comm.alive import Watch
from shoal.comm.calls import CALLS
from shoal.comm.members import dead_key, members_of, news_key
from shoal.comm.torch_private import cuttable_connection, end_operations, own_connection
from shoal.core.errors import PeerLost
from shoal.fault.generation import Generation
from shoal.fault.membership import Membership

_LONG = timedelta(days=365)
_END_S = 1.0


class Ear:
    """Listens for one generation, from its agreement to its end. `close` before the next one."""

    def __init__(
        self,
        membership: Membership,
        generation: Generation,
        *,
        ahead: int = 1,
        let_go_s: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """`let_go_s` is asked how long the main thread may take to come back: longer than a step, in any case."""
        self.over = ""
        """Why the generation is over, once that is known."""
        self._membership, self._generation, self._ahead, self._let_go_s = membership, generation, ahead, let_go_s
        connection, self._cut = cuttable_connection(membership.store)
        self.store: dist.Store = dist.PrefixStore(generation.prefix(), connection)
        """What the generation says; a wait in it ends when the generation does."""
        self._own = own_connection(membership.store)
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._is_armed = False
        self._leave_after: int | None = None
        CALLS.lost = None
        self._thread = threading.Thread(target=self._listen, name="membership", daemon=True)
        self._thread.start()

    def watch_with(self, watch: Watch | None) -> None:
        """Let `watch` know when the generation is over."""
        with self._lock:
            self._watch = watch
            if self.over and watch is not None:
                watch.give_up(self.over)

    @property
    def is_armed(self) -> bool:
        """Whether somebody waits to be let in, as far as this member has heard."""
        return self._is_armed

    def leaves_after(self, step: int) -> bool:
        """Return whether all leave their generation after `step`, which this member has just done."""
        if not self._is_armed:
            return False
        if self._leave_after is None:
            self._leave_after = self._decide(step)
        return self._leave_after is not None and step >= self._leave_after

    def close(self) -> None:
        """Hear no more: what the main thread waits in from now on is none of this generation's."""
        with self._lock:
            was_closed = self._is_closed.is_set()
            self._is_closed.set()
            self._watch = None
        if not was_closed:
            self._membership.tell(self._generation, left=self._membership.name)
            self._thread.join(_END_S)

    def _decide(self, step: int) -> int | None:
        """Return after which step all leave, deciding it if need be; None while some have not heard."""
        if len(self._generation.members) == 1:
            return step
        if self.store.check(["leave"]):
            return int(self.store.get("leave"))
        if self.store.add("leaving", 0) < len(self._generation.members):
            return None
        return int(self.store.compare_set("leave", "", str(step + self._ahead)))

    def _listen(self) -> None:
        members, number = members_of(self._own), 1
        try:
            if self._membership_has_dead(members):
                self._hear_over("a member was lost while the groups were formed.")
            while not self._is_closed.is_set():
                key = news_key(self._generation.number, number)
                members.wait([key], _LONG)  # ended by `close`, which is news, too
                self._hear(json.loads(members.get(key)))
                number += 1
        except RuntimeError:  # the store is gone, and with it the launcher: the watch says so
            return

    def _membership_has_dead(self, members: dist.Store) -> bool:
        """Return whether somebody died between saying that it is there and the closing of the list."""
        return any(members.check([dead_key(name)]) for name in self._generation.names)

    def _hear(self, news: dict[str, str]) -> None:
        if "over" in news:
            self._hear_over(news["over"])
        elif "waits" in news and not self._is_armed and not self._is_closed.is_set() and self._would_grow():
            self._is_armed = True  # before it is counted: whoever finds all counted relies on it
            dist.PrefixStore(self._generation.prefix(), self._own).add("leaving", 1)

    def _would_grow(self) -> bool:
        return self._membership.would_grow(self._generation)

    def _hear_over(self, why: str) -> None:
        with self._lock:
            if self._is_closed.is_set() or self.over:
                return
            self.over = why
            CALLS.lost = why
            if self._watch is not None:
                self._watch.give_up(why)
            end_operations()
            self._cut()
        threading.Thread(target=self._see_it_let_go, name="let go", daemon=True).start()

    def _see_it_let_go(self) -> None:
        if not self._is_closed.wait(min(self._let_go_s(), threading.TIMEOUT_MAX)):
            said = f"worker {self._membership.name} could not be released from a collective, and ends: {self.over}"
            print(said, file=sys.stderr, flush=True)
            os._exit(PeerLost.exit_code)

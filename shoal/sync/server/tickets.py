"""Tickets: who computes which part of which step, where no worker waits for the others.

1. Ticket t is part t % p of step t // p + 1, with p workers. Each worker takes the next one from a counter in the
   store, when it likes: a fast worker takes more. So every part is computed once, whoever does.
2. A ticket whose holder has died before it was applied at all servers is given to whoever asks next. Servers that have
   it already know it by its number, and let it be: every part counts once at each of them.
3. A ticket more than `max_staleness` steps ahead of the oldest that is not applied, and whose holder lives, waits.

Example: 2 workers, of which worker 1 is three times slower. Worker 0 takes tickets 0, 2 and 3 (part 1 of step 1 is
worker 1's ticket 1; 2 and 3 are both parts of step 2), worker 1 takes 1 and then 4.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch.distributed import Store

from shoal.core.errors import PeerLost


@dataclass
class Done:
    """Which tickets are applied: all before `oldest`, and those `beyond` it."""

    oldest: int
    beyond: set[int] = field(default_factory=set)

    @property
    def count(self) -> int:
        """How many."""
        return self.oldest + len(self.beyond)

    def has(self, ticket: int) -> bool:
        """Return whether a ticket is among them."""
        return ticket < self.oldest or ticket in self.beyond

    def add(self, ticket: int) -> None:
        """Note that a ticket is applied."""
        self.beyond.add(ticket)
        while self.oldest in self.beyond:
            self.beyond.remove(self.oldest)
            self.oldest += 1


@dataclass(frozen=True)
class Ticket:
    """Part `part` of step `step`, from 1."""

    number: int
    step: int
    part: int


class Tickets:
    """Those of one worker. All of it is called by the thread that trains.

    `ask(ticket)` returns how far each server is, waiting a moment if one of them lacks a ticket before that one.
    """

    def __init__(
        self,
        store: Store,
        *,
        worker: int,
        workers: int,
        first_step: int,
        last_step: int,
        ask: Callable[[int], Sequence[Done]],
        timeout_s: float,
    ) -> None:
        self._store, self._worker, self._workers = store, str(worker), workers
        self._first, self._last_step, self._ask, self._timeout_s = (first_step - 1) * workers, last_step, ask, timeout_s
        self.held: list[Ticket] = []
        """Taken, and not yet pushed, in the order in which they were taken."""
        self.dead: set[int] = set()
        """The workers that are gone, as the servers say."""
        self.oldest = self._first
        """The oldest ticket that is not applied everywhere, as far as the servers have said."""

    def take(self) -> Ticket | None:
        """Return what to compute next; None if all is given out."""
        ticket = self._orphan() or self._next()
        if ticket is not None:
            self.held.append(ticket)
        return ticket

    def release(self, step: int, part: int) -> Ticket:
        """Return the ticket for a part, which is computed now."""
        ticket = next(held for held in self.held if (held.step, held.part) == (step, part))
        self.held.remove(ticket)
        return ticket

    def keep_pace(self, ticket: Ticket, max_staleness: int) -> bool:
        """Wait until `ticket` is not too far ahead; return whether it had to."""
        if any(held.number < ticket.number for held in self.held):  # nobody waits who holds what others wait for
            return False
        needed, has_waited = (ticket.step - 1 - max_staleness) * self._workers, False
        if needed <= self.oldest:
            return False
        for _ in self._until_late():
            pending = self._pending(needed)
            if not any(self._lives(number) for number in pending):
                return has_waited
            has_waited = True
        raise PeerLost(f"step {ticket.step - max_staleness} has not been applied within {self._timeout_s:g} s.")

    def wait_for_step(self, step: int) -> None:
        """Wait until all tickets up to `step` are applied."""
        for _ in self._until_late():
            pending = self._pending(step * self._workers)
            if not pending:
                return
            ticket = self._ticket(pending[0])
            if not self._lives(pending[0]):
                raise PeerLost(f"part {ticket.part} of step {ticket.step} was with a worker who is gone.")
        raise PeerLost(f"part {ticket.part} of step {ticket.step} has not come within {self._timeout_s:g} s.")

    def _until_late(self) -> Iterator[None]:
        end_s = time.monotonic() + self._timeout_s
        while time.monotonic() < end_s:
            yield

    def _next(self) -> Ticket | None:
        while True:
            ticket = self._ticket(self._first + int(self._store.add("tickets", 1)) - 1)
            if self._last_step and ticket.step > self._last_step:
                return None
            if self._claim(ticket.number, ""):
                return ticket

    def _orphan(self) -> Ticket | None:
        """Take over a ticket whose holder is gone, if there is one."""
        if self.dead:
            for number in self._pending(self._first + int(self._store.add("tickets", 0)), ask_for=0):
                ticket, holder = self._ticket(number), self._holder(number)
                is_beyond = self._last_step and ticket.step > self._last_step
                if not is_beyond and (not holder or int(holder) in self.dead) and self._claim(number, holder):
                    return ticket
        return None

    def _pending(self, end: int, ask_for: int | None = None) -> list[int]:
        """Return the tickets before `end` that are not applied everywhere, after waiting a moment for them."""
        states = self._ask(end if ask_for is None else ask_for)
        first = min(state.oldest for state in states)
        return [number for number in range(first, end) if not all(state.has(number) for state in states)]

    def _lives(self, number: int) -> bool:
        """Return whether a ticket is with a worker that is there, or will be."""
        holder = self._holder(number)
        return int(holder) not in self.dead if holder else not self.dead

    def _holder(self, number: int) -> str:
        key = f"holder {number}"
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _claim(self, number: int, before: str) -> bool:
        if before == self._worker:
            return False
        return bool(self._store.compare_set(f"holder {number}", before, self._worker).decode() == self._worker)

    def _ticket(self, number: int) -> Ticket:
        return Ticket(number, number // self._workers + 1, number % self._workers)

"""Workers that are lost, and those that are started in their place; and those that are added or ended as asked.

1. Every worker is told what it is called (comm/members.py), and that whoever is lost is replaced.
2. One that ends by a signal, or because it was cut off from the others (PeerLost), is lost. The others are told,
   and go on without it. Another is started, `restarts` times for each worker at most, and joins them; if none is, or
   the system has no room for it, that is told, too: who cannot go on without it need not wait.
3. If none is left that has trained, those that are started wait for each other, and go on from what is in memory of
   this host, or on the disk.
4. A worker that the others have given up, because it was silent, is killed: it is lost then.
5. Any other end of a worker is the end of the run, as it always was: its own failure, or that somebody asked to stop.
6. If the run is asked to go on with more workers (wishes.py), those with the next numbers are started, and join as one
   that replaces another does. If with fewer, those with the highest numbers are ended, as if they were lost, and nobody
   takes their place until more are asked for.
"""

import contextlib
import itertools
import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from shoal.core.errors import PeerLost
from shoal.launch.starting import NotStarted
from shoal.launch.wishes import Wishes
from shoal.spec.on_loss import OnLoss

if TYPE_CHECKING:
    from shoal.launch.local import Worker

_LOOK_EVERY = 10
"""After how many looks at ended workers it is asked whether one was given up."""
_HELD_BACK_S = 2.0
"""How long a start is held back for the others to go on first."""


class Replacing:
    """What the launcher does about lost workers."""

    def __init__(
        self,
        store: Any,
        settings: OnLoss,
        *,
        start: Callable[[int, str], "Worker"],
        say: Callable[[str], None],
        wishes: Wishes | None = None,
    ) -> None:
        """`start` starts worker NUMBER as member NAME; `store` is the one that the workers meet in.

        `wishes`: with how many workers the run is asked to go on, where it can be.
        """
        from shoal.comm import members  # imports torch

        self._keys, self._members = members, members.members_of(store)
        self._settings, self._start, self._say, self._wishes = settings, start, say, wishes
        self._starts: dict[int, int] = {}
        self._first: dict[int, int] = {}  # how often a worker was started before it was asked for anew
        self._looks = 0
        self._due: list[tuple[Worker, float, int | None]] = []

    def start_all(self, ranks: Iterable[int]) -> Iterator["Worker"]:
        """Yield the first processes of the workers of this host."""
        numbers = list(ranks)
        self._keys.await_members(self._members, self._keys.first_names(numbers))
        for number in numbers:
            yield self._next(number)

    def look(self, workers: list["Worker"], *, is_ending: bool) -> list["Worker"]:
        """Deal with the workers that have ended since; return those that were started, in their place or besides.

        The former stand in `workers` where those stood. If all `is_ending`, nobody is started any more.
        """
        lost = [worker for worker in workers if not worker.is_lost and _is_loss(worker.exit_code)]
        for worker in lost:
            worker.is_lost = True
            self._keys.tell_dead(self._members, worker.member, _how(worker))
            if not is_ending and self._may_start(worker, workers):
                self._due.append((worker, time.monotonic(), self._keys.last_generation(self._members)))
            else:
                self._keys.tell_last(self._members, worker.rank)
        self._end_given_up(workers)
        return [] if is_ending else [*self._start_due(workers), *self._scale(workers)]

    def is_finished(self) -> bool:
        """Return whether the workers have come to the end of the run."""
        return bool(self._members.check([self._keys.FINISHED]))

    def has_done(self, worker: "Worker") -> bool:
        """Return whether the worker has said that it ends in order: user code may end a process with 0 as well."""
        return bool(self._members.check([self._keys.done_key(worker.member)]))

    def _next(self, number: int) -> "Worker":
        start = self._starts.get(number, 0)
        self._starts[number] = start + 1
        return self._start(number, self._keys.member_name(number, start))

    def _start_due(self, workers: list["Worker"]) -> list["Worker"]:
        """Start those that are due: when the others have gone on, for a start takes a core for seconds."""
        now_s, generation = time.monotonic(), self._keys.last_generation(self._members)
        is_left = any(worker.exit_code is None for worker in workers)
        due = [one for one in self._due if not is_left or one[2] != generation or now_s - one[1] > _HELD_BACK_S]
        self._due = [one for one in self._due if one not in due]
        started = []
        for worker, _, _ in due:
            try:
                started.append(self._next(worker.rank))
            except NotStarted as error:
                self._leave_out(worker.rank, error)
                continue
            workers[workers.index(worker)] = started[-1]
        if started:
            self._await_all(workers)
        return started

    def _leave_out(self, number: int, why: NotStarted) -> None:
        self._say(f"{why} The others go on without it.")
        self._keys.tell_last(self._members, number)

    def _may_start(self, worker: "Worker", workers: list["Worker"]) -> bool:
        """Return whether another may be started in the place of `worker`, and say so."""
        who = f"worker {worker.rank} (pid {worker.process.pid}) {_how(worker)}"
        left = [other for other in workers if not other.is_lost and other.exit_code is None]
        rest = "the others go on" if left else "nobody is left"
        if self.is_finished():
            self._say(f"{who}, at the end of the run.")
            return False
        if self._starts[worker.rank] - self._first.get(worker.rank, 0) > self._settings.restarts:
            self._say(f"{who}; {rest}. It was started {self._settings.restarts + 1} times, and is not again.")
            return False
        self._say(f"{who}; {rest}, and another is started in its place.")
        return True

    def _await_all(self, workers: list["Worker"]) -> None:
        """Let those that were started wait for each other, if nobody else is left."""
        now = self._keys.last_generation(self._members)
        listed = json.loads(self._members.get(self._keys.list_key(now))) if now is not None else []
        if all(self._members.check([self._keys.dead_key(member["name"])]) for member in listed):
            running = [worker.member for worker in workers if worker.exit_code is None]
            self._keys.await_members(self._members, running)

    def _scale(self, workers: list["Worker"]) -> list["Worker"]:
        """Start workers, or end some, if the run was asked to go on with more or fewer; return those started."""
        if self._wishes is None or any(worker.is_lost != (worker.exit_code is not None) for worker in workers):
            return []  # some that are to end have not yet; or some have ended by themselves, and with them the run
        wanted = self._wishes.look()
        if wanted is None or self.is_finished():
            return []
        numbers = {worker.rank for worker in workers if worker.exit_code is None}
        numbers |= {worker.rank for worker, _, _ in self._due}
        asked = f"the run was asked for {wanted} {'worker' if wanted == 1 else 'workers'} (shoal scale)"
        free = (number for number in itertools.count() if number not in numbers)
        added = list(itertools.islice(free, max(0, wanted - len(numbers))))
        ended = sorted(numbers)[wanted:]
        if added:
            self._say(f"{_named(added)} added: {asked}.")
        elif ended:
            self._say(f"{_named(ended)} ended: {asked}.")
            self._end(ended, workers, f"was ended, for {asked}")
        else:
            self._say(f"{asked}, and has as many.")
        return [started for number in added if (started := self._add(number, workers)) is not None]

    def _add(self, number: int, workers: list["Worker"]) -> "Worker | None":
        """Start worker `number`, which is not there: it never was, or has ended. None where there is no room for it."""
        assert self._wishes is not None
        self._first[number] = self._starts.get(number, 0)
        self._keys.tell_started(self._members, number, workers=self._wishes.workers)
        self._wishes.note(number + 1)
        try:
            started = self._next(number)
        except NotStarted as error:
            self._leave_out(number, error)
            return None
        place = next((place for place, worker in enumerate(workers) if worker.rank == number), len(workers))
        workers[place : place + 1] = [started]
        return started

    def _end(self, numbers: Iterable[int], workers: list["Worker"], why: str) -> None:
        """End the workers of these `numbers`; the others are told of all at once, and go on without them."""
        self._due = [one for one in self._due if one[0].rank not in numbers]
        ending = [worker for worker in workers if worker.rank in numbers and worker.exit_code is None]
        for worker in ending:
            self._keys.note_dead(self._members, worker.member, why, is_asked=True)
        for worker in ending:
            worker.is_lost = worker.is_ended_by_us = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(worker.process.pid, signal.SIGKILL)
        for number in numbers:
            self._keys.tell_last(self._members, number)
        for worker in ending:
            self._keys.tell_dead(self._members, worker.member, why)

    def _end_given_up(self, workers: list["Worker"]) -> None:
        self._looks += 1
        if self._looks % _LOOK_EVERY == 0:
            for worker in workers:
                if worker.exit_code is None and self._members.check([self._keys.dead_key(worker.member)]):
                    worker.process.kill()


def _named(numbers: list[int]) -> str:
    """Return "worker 2 is", or "workers 2, 3 are"."""
    return f"worker{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))} {'are' if len(numbers) > 1 else 'is'}"


def _is_loss(code: int | None) -> bool:
    """Return whether a worker that has ended so is lost, and has not failed by itself."""
    return code is not None and (code < 0 or code == PeerLost.exit_code)


def _how(worker: "Worker") -> str:
    code = worker.exit_code or 0
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else "was cut off from the others"

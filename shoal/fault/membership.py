"""Who is in the run: when workers die or come, those who are there agree on it, and go on.

A generation is a set of members (processes) that train together, with process groups of their own. All that is said
here is said through the store, which the launcher hosts and which outlives every worker (comm/members.py).

1. Whoever lives and is in no generation, be it a survivor or one that was just started, says that it is there for the
   next one, and what state it holds.
2. That generation's list is closed by whoever is the first to see that nobody is missing: everyone of the generation
   before is there or dead. Dead is whoever the launcher, who sees processes end, calls so; whose process is gone from
   this host; and, elsewhere or stopped, who does not beat any more (the launcher then ends it for good).
3. All read the list, which is closed once for all: who is not in it waits for the next one. Ranks are in the order of
   the members' numbers.
4. If members die while all this goes on, or while groups are formed, that is the loss of the next generation.
5. Nobody goes on where a member's own code has raised: it would raise again. Launchers then end all of them.
6. If those who are there cannot hold a whole model, they wait for a replacement, `wait_s` at most. If none comes, by
   then or by the launcher's word, they go on as `fits_at_last` says that they can; else the run ends.

Example: worker 2 of 4 is killed in step 41 of generation 0. The launcher writes "dead 2.0"; 0, 1 and 3 are released
from their collectives, and write that they are there for generation 1. Worker 3, the last to come, finds nobody missing
and closes the list: 0.0, 1.0, 3.0, ranks 0, 1 and 2. Three seconds later 2.1 has started, and says that it is there for
generation 2. After step 47 all four agree on that.
"""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch.distributed as dist

from shoal.comm.calls import CALLS
from shoal.comm.members import (
    AWAITED,
    FAILED,
    FINISHED,
    NOW,
    dead_key,
    done_key,
    last_generation,
    last_key,
    list_key,
    members_of,
    number_of,
    numbers_of,
    tell,
    tell_dead,
)
from shoal.comm.others import LEFT, Other, beat_of, is_gone, process_of_this
from shoal.comm.rank import Rank
from shoal.comm.torch_private import own_connection
from shoal.core.errors import PeerLost, WorkerFailed
from shoal.core.host import host_id
from shoal.fault.generation import Generation, Member

SILENT_S = 10.0
"""How long the beat of a member must have stood still to give it up, while the others wait for it: threads of a busy
machine have been silent for seconds."""
_PAUSE_S, _MOST_PAUSE_S = 1e-3, 0.02
_PATIENT_S, _LONG_PAUSE_S = 30.0, 0.2
"""After how long one that waits looks less often, and how often: it may be a spare one, for hours."""


class Membership:
    """One member's view of who is there."""

    def __init__(
        self,
        store: dist.Store,
        rank: Rank,
        *,
        fits: Callable[[int], int],
        fits_at_last: Callable[[int], int] = lambda _: 0,
        timeout_s: float,
        wait_s: float,
    ) -> None:
        """`fits` tells how many of so many workers can train together: 0 where they cannot hold a whole model.

        `fits_at_last` tells it where nobody will join them. Survivors are waited for at most `timeout_s`, a
        replacement that is needed at most `wait_s`.
        """
        self.store = own_connection(store)
        self.members = members_of(self.store)
        self.name, self._rank = rank.member, rank
        self.current: Generation | None = None
        """The last generation that this member was in."""
        self._fits, self._fits_at_last, self._timeout_s, self._wait_s = fits, fits_at_last, timeout_s, wait_s
        self._beats: dict[str, tuple[bytes, float]] = {}
        self._dead: dict[str, dict[str, Any]] = {}

    def agree(
        self, step: int = -1, evaluated: int = -1, *, check: Callable[[], None] = lambda: None
    ) -> Generation | None:
        """Return the next generation that this member is in; None if the run is finished. It holds state of `step`.

        `check` is called while this waits, and may raise. A survivor raises PeerLost if the others do not come in time,
        WorkerFailed if there are not enough. Whoever has only been started waits as long as the others train.
        """
        number = self._next()
        self._beats = {}
        here = Member(self.name, step, evaluated, host=host_id(), **process_of_this())
        self._announce(number, here)
        began_s, pause_s = time.monotonic(), _PAUSE_S
        with CALLS.waiting_in("the agreement on who is left"):
            while True:
                if self.members.check([FINISHED]):
                    return None
                if (closed := self.closed(number)) is not None:
                    if self.name in closed.names:
                        self.members.set(NOW, str(number))  # by each: nobody goes on before it stands there
                        self.current = closed
                        return closed
                    number, began_s, pause_s = number + 1, time.monotonic(), _PAUSE_S
                    self._announce(number, here)
                    continue
                missing, present = self._look(number)
                waited_s, has_failed = time.monotonic() - began_s, self.members.check([FAILED])
                if not missing and not has_failed and self._close(number, present, waited_s):
                    continue
                check()
                self._check_time(waited_s, missing, has_failed=has_failed)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MOST_PAUSE_S if time.monotonic() - began_s < _PATIENT_S else _LONG_PAUSE_S)

    def rank_in(self, generation: Generation) -> Rank:
        """Return who this process is in `generation`."""
        index = generation.names.index(self.name)
        hosts = [member.host for member in generation.members]
        return dataclasses.replace(
            self._rank,
            index=index,
            workers=len(hosts),
            local_index=hosts[:index].count(hosts[index]),
            local_workers=hosts.count(hosts[index]),
            numbers=tuple(member.number for member in generation.members),
        )

    def lost_since(self, before: Generation, now: Generation) -> dict[str, dict[str, Any]]:
        """Return who of `before` is dead, and what was said of that."""
        return {name: self._dead[name] for name in before.names if name not in now.names and self._is_dead(name)}

    def verdict(self, generation: Generation) -> str:
        """Return why the watch (comm/alive.py) has ended `generation`, or ""."""
        key = f"{generation.prefix()}/alive/verdict"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def tell(self, generation: Generation, **news: str) -> None:
        """Tell all members of `generation` something, as that it is `over`, and why."""
        tell(self.members, generation.number, **news)

    def finish(self) -> None:
        """Say that the run has come to its end, and this member too. Called when all have done what they had to."""
        self.members.set(FINISHED, "1")
        self.members.set(done_key(self.name), "1")

    def fail(self) -> None:
        """Say that the run ends because this member's own code has raised. Called before its process ends."""
        with contextlib.suppress(RuntimeError):  # without a store there is nobody to go on
            self.members.set(FAILED, "1")

    def would_grow(self, generation: Generation) -> bool:
        """Return whether those who wait to be let in would make `generation` larger."""
        waiting = [member for member in self._present(generation.number + 1) if member.name not in generation.names]
        return self._fits(len(generation.members) + len(waiting)) > len(generation.members)

    def closed(self, number: int) -> Generation | None:
        """Return the generation of that number, if its list is closed."""
        key = list_key(number)
        if number < 0 or not self.members.check([key]):
            return None
        return Generation(number, tuple(Member(**fields) for fields in json.loads(self.members.get(key))))

    def _next(self) -> int:
        if self.current is not None:
            return self.current.number + 1
        last = last_generation(self.members)
        return 0 if last is None else last + 1

    def _announce(self, number: int, here: Member) -> None:
        """Say that this member is there for the generation of that number, and have the one before learn of it."""
        place = self.members.add(f"comers {number}", 1)
        self.members.set(f"comer {number}/{place}", json.dumps(dataclasses.asdict(here)))
        before = self.closed(number - 1)
        if before is not None and self.name not in before.names:
            tell(self.members, before.number, waits=self.name)

    def _present(self, number: int) -> list[Member]:
        """Return who is there for the generation of that number, and alive, in the order of their numbers."""
        count = self.members.add(f"comers {number}", 0)
        keys = [f"comer {number}/{place}" for place in range(1, count + 1)]
        comers = [Member(**json.loads(self.members.get(key))) for key in keys if self.members.check([key])]
        living = {comer.name: comer for comer in comers if not self._is_dead(comer.name, comer)}
        return sorted(living.values(), key=lambda member: member.number)

    def _look(self, number: int) -> tuple[list[str], list[Member]]:
        """Return who is missing for the generation of that number, and who is there."""
        before, present = self.closed(number - 1), self._present(number)
        here = {member.name for member in present}
        known = {member.name: member for member in before.members} if before is not None else {}
        expected = dict.fromkeys([*known, *self._awaited()])
        missing = [name for name in expected if name not in here and not self._is_dead(name, known.get(name))]
        if before is not None and self.name in before.names:  # who only comes cannot tell: the others may just train
            self._give_up_silent(before, missing)
        return missing, present

    def _awaited(self) -> list[str]:
        awaited: list[str] = json.loads(self.members.get(AWAITED)) if self.members.check([AWAITED]) else []
        return awaited

    def _close(self, number: int, present: Sequence[Member], waited_s: float) -> bool:
        """Close the list, if those who are there can train; return whether it is closed.

        Raises WorkerFailed if they never will: no launcher would mend that by starting them again.
        """
        count = self._fits(len(present))
        if count == 0 and (why := self._in_vain(present, waited_s)):
            count = self._fits_at_last(len(present))
            if count == 0:
                raise WorkerFailed(why)
        if count == 0:
            return False
        # Whoever holds state goes before those who hold none, and low numbers before high ones.
        chosen = sorted(present, key=lambda member: (member.step < 0, member.number))[:count]
        chosen.sort(key=lambda member: member.number)
        text = json.dumps([dataclasses.asdict(member) for member in chosen])
        self.members.compare_set(list_key(number), "", text)
        return True

    def _in_vain(self, present: Sequence[Member], waited_s: float) -> str:
        """Return why those who are there need not wait for others any more, as an error says it; "" while they do."""
        left = f"{len(present)} worker{'s that are' if len(present) > 1 else ' that is'} left"
        lacks = f"{'do' if len(present) > 1 else 'does'} not hold a whole model"
        numbers = range(numbers_of(self.members, self._rank.workers))
        lost = sorted(set(numbers) - {member.number for member in present})
        if all(self.members.check([last_key(number)]) for number in lost):
            names = f"worker{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost))}"
            are = "are" if len(lost) > 1 else "is"
            return (
                f"{names} {are} lost, and {are} started no more (on_loss.restarts); the {left} {lacks}. Go on from the "
                "last checkpoint, with any plan: --resume"
            )
        if waited_s > self._wait_s:
            return f"the {left} {lacks}, and no replacement has come within {self._wait_s:g} s (on_loss.wait_s)."
        return ""

    def _check_time(self, waited_s: float, missing: Iterable[str], *, has_failed: bool) -> None:
        """Raise PeerLost if it is in vain to wait on; whoever was never in a generation waits for those who are."""
        if has_failed and waited_s > self._timeout_s:  # long before, its launcher should have ended this one
            raise PeerLost("the code of another worker has raised, and ended the run.")
        if self.current is None and self.closed(0) is not None:
            return
        names = ", ".join(f"worker {number_of(name)}" for name in missing)
        if names and waited_s > self._timeout_s:
            raise PeerLost(f"{names} did not come within {self._timeout_s:g} s to agree on how to go on.")

    def _is_dead(self, name: str, member: Member | None = None) -> bool:
        if name in self._dead:
            return True
        if self.members.check([dead_key(name)]):
            self._dead[name] = json.loads(self.members.get(dead_key(name)))
            return True
        if member is None or name == self.name:
            return False
        other = Other(host=member.host, process=member.process, processes=member.processes)
        if is_gone(other, host_id()):
            tell_dead(self.members, name, "has ended without a word (no such process)")
        return name in self._dead

    def _give_up_silent(self, before: Generation, missing: Sequence[str]) -> None:
        """Call those dead of the generation `before` whose beat has not moved for long."""
        for name in missing:
            if name not in before.names:
                continue
            key = f"{before.prefix()}/alive/{beat_of(before.names.index(name))}"
            beat, now_s = self.store.get(key) if self.store.check([key]) else b"", time.monotonic()
            was, since_s = self._beats.get(key, (b"", now_s))
            self._beats[key] = (beat, since_s if beat == was else now_s)
            is_leaving = beat == LEFT.encode()  # it has given up its groups, and is on its way here
            if not is_leaving and now_s - self._beats[key][1] > SILENT_S:
                tell_dead(self.members, name, f"has been silent for {SILENT_S:g} s")

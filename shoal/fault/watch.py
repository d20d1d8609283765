"""A hang becomes a sentence within seconds: who holds the others up, in which line, and in what these wait.

1. Beside its beat (comm/alive.py), a worker that has not moved for a second publishes where it is: the collectives that
   it has entered and not left (comm/calls.py), and the line of its main thread (watch_stack.py). One that moves
   publishes nothing, and nothing is done for it in a step.
2. A worker that has not moved for half of `hang_s` reads what all others have published, at each beat.
3. After `hang_s` the first of those who read says why (watch_sentence.py), to stderr and into its events; again after
   four times as long, and so on. `hang_s` is ten times the usual step, and 5 s at least.
4. It becomes an error, for all workers, at the group's timeout; or at once, where no waiting can help: collectives that
   do not match, a worker whose process has ended.

Example: steps take 0.2 s. At 12:00:00 worker 3 of 4 enters a sample that never comes. At 12:00:02 all four have
published that they stand still, from 12:00:03 on they read, and at 12:00:05 worker 0 says: "worker 3 is in
dataset.py:88 (5.1 s), the others wait in the sum of gradients #1204, bucket 7 of 12 (step 301)."
"""

import contextlib
import dataclasses
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from shoal.comm.alive import BEAT_S, Watch, watching
from shoal.comm.calls import CALLS, Call
from shoal.comm.others import LEFT, beat_of
from shoal.comm.rank import Rank
from shoal.core.events import EventLog
from shoal.core.host import host_id
from shoal.fault.watch_sentence import Entry, Hang, explain
from shoal.fault.watch_stack import Dump, Place, place_now, read_dump, state_of

HANG_S = 5.0
"""How long nothing must have moved at least before it is called a hang."""
START_S = 6.0
"""The same before the second step: building, compiling and the first samples take their time."""
USUAL_STEPS = 10.0
"""How many times the usual step that must be, too."""
PUBLISH_S = 1.0
SILENT_S = 2.0
"""How long the beat of a worker must have stood still to call it silent: it is only said, nobody is given up for it."""
CONFIRMED = 2
"""At how many looks in a row after the first it must be the same: by then, who is silent is known to be."""
EARLY_S = 2.0
"""How long before the group's timeout a hang becomes an error: before the engine raises one that names nobody."""
AGAIN = 4.0
"""After how many times the time of the last sentence it is said again."""
_GONE = "has ended"


def print_hang(sentence: str) -> None:
    """Say it on stderr. Not as an error: it may be a sample that takes long, and go on."""
    print(f"Waiting: {sentence}", file=sys.stderr, flush=True)


@contextmanager
def watched(
    store: Store | None, rank: Rank, *, timeout_s: float, silent_s: float, log: EventLog | None = None
) -> Iterator[Watch | None]:
    """Watch the other workers for the length of a `with` block, and have lost ones named and hangs explained.

    Called by every worker; one that is alone, without a store, has nothing to watch.
    """
    if store is None:
        yield None
        return
    with (
        watching(store, rank, timeout_s=timeout_s, silent_s=silent_s) as watch,
        explained(watch, rank, timeout_s=timeout_s, log=log),
    ):
        yield watch


@contextmanager
def explained(
    watch: Watch,
    rank: Rank,
    *,
    timeout_s: float,
    log: EventLog | None = None,
    hang_s: float | None = None,
    say: Callable[[str], None] = print_hang,
) -> Iterator["HangWatch"]:
    """Have hangs explained for the length of a `with` block, and errors made of them after `timeout_s`.

    Called by every worker, inside `watching`. `hang_s`: instead of that of the usual step.
    """
    hangs = HangWatch(watch, rank, timeout_s=timeout_s, log=log, hang_s=hang_s, say=say)
    watch.on_beat = hangs.beat
    try:
        yield hangs
    finally:
        watch.on_beat = None
        hangs.close()


@dataclass
class _Seen:
    """What this worker has seen of another."""

    beat: str = ""
    silent_s: float = 0.0
    same_s: float = 0.0
    """For how long its main thread has been in the very same lines."""
    said: dict[str, Any] = dataclasses.field(default_factory=dict)


class HangWatch:
    """What one worker publishes of itself and knows of the others; driven by the thread that beats."""

    def __init__(
        self,
        watch: Watch,
        rank: Rank,
        *,
        timeout_s: float,
        log: EventLog | None,
        hang_s: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._watch, self._rank = watch, rank
        self._error_s = max(timeout_s / 2, timeout_s - EARLY_S)
        self._log, self._hang_s, self._say = log, hang_s, say
        self._dump = Dump()
        self._pace = Pace()
        self._seen: dict[int, _Seen] = {}
        self._published_s = 0.0
        self._is_introduced = False
        self._say_at_s = 0.0
        self._hang: object = None
        self._confirmed = 0

    def beat(self, store: Store) -> None:
        """Publish and look. Called after each beat; an error here must not end the beating."""
        with contextlib.suppress(Exception):
            self._dump.again()
            still_s = self._pace.look(CALLS.progress(), CALLS.step)
            if not self._is_introduced or still_s >= PUBLISH_S or self._published_s > 0:
                self._publish(store, still_s)
            if still_s >= self.hang_s / 2:
                self._read(store)
            elif self._seen:
                self._seen, self._say_at_s, self._hang, self._confirmed = {}, 0.0, None, 0

    @property
    def hang_s(self) -> float:
        """How long nothing must have moved now."""
        usual_s = self._pace.step_s
        adapted_s = START_S if usual_s is None else max(HANG_S, USUAL_STEPS * usual_s)
        return min(adapted_s if self._hang_s is None else self._hang_s, self._error_s)

    def close(self) -> None:
        """Publish no more."""
        self._dump.close()

    def _publish(self, store: Store, still_s: float) -> None:
        place, waits = place_now(), CALLS.waits()
        if place.waits_in and not waits:
            waits = [Call("", 0, f"a message ({place.waits_in.strip('_')})")]
        said = {
            "host": host_id(),
            "pid": os.getpid(),
            "file": self._dump.file,
            "step": CALLS.step,
            "still_s": still_s,
            "place": place.text,
            "path": place.path,
            "stack": place.stack,
            "is_busy": place.is_busy,
            "waits": [dataclasses.asdict(call) for call in waits],
            "entered": CALLS.entered(),
        }
        store.set(_where_is(self._rank.index), json.dumps(said))
        self._published_s, self._is_introduced = still_s, True

    def _read(self, store: Store) -> None:
        workers = range(self._rank.workers)
        keys = [key for worker in workers for key in (beat_of(worker), _where_is(worker))]
        if not store.check(keys):
            return  # somebody has not come yet
        values = [value.decode() for value in store.multi_get(keys)]
        for worker, beat, said in zip(workers, values[::2], values[1::2], strict=True):
            seen = self._seen.setdefault(worker, _Seen(beat))
            seen.silent_s = seen.silent_s + BEAT_S if beat == seen.beat else 0.0
            is_same = json.loads(said)["stack"] == seen.said.get("stack")
            seen.same_s = seen.same_s + BEAT_S if is_same else 0.0
            seen.beat, seen.said = beat, json.loads(said)
        number_of = self._rank.number_of  # what people call them: after a loss, not their places in the group
        entries = {number_of(worker): self._entry(seen) for worker, seen in self._seen.items()}
        hang = explain(entries) or self._all_still(entries)
        self._confirmed = self._confirmed + 1 if hang is not None and self._hang == hang.key else 0
        self._hang = hang.key if hang is not None else None
        is_confirmed = self._confirmed >= CONFIRMED
        is_clear = not any(2 * BEAT_S <= seen.silent_s < SILENT_S for seen in self._seen.values())
        if hang is not None and is_confirmed and is_clear and _longest_s(entries) >= self.hang_s:
            self._found(hang, entries)

    def _entry(self, seen: _Seen) -> Entry:
        said, silence = seen.said, ""
        place = said["place"]
        if seen.beat == LEFT:
            silence = f"has left after step {said['step']}"
        elif seen.silent_s >= SILENT_S:
            silence, place = _silence(seen)
        return Entry(
            step=said["step"],
            still_s=said["still_s"],
            place=place,
            is_busy=said["is_busy"],
            waits=tuple(
                Call(**{**call, "members": tuple(map(self._rank.number_of, call["members"]))}) for call in said["waits"]
            ),
            entered=said["entered"],
            silence=silence,
        )

    def _all_still(self, entries: dict[int, Entry]) -> Hang | None:
        """Return a hang of workers of whom none waits for another, after a time in which they surely should move."""
        if min(seen.same_s for seen in self._seen.values()) < 2 * self.hang_s:
            return None
        places = sorted({entry.place for entry in entries.values() if entry.place})
        said = f"no worker moves ({_longest_s(entries):.1f} s): all are in {', '.join(places[:4])}."
        return Hang(said, (), is_final=False)

    def _found(self, hang: Hang, entries: dict[int, Entry]) -> None:
        """Say it, if it is this worker's turn, and end the run where it must end."""
        half_s = self.hang_s / 2
        speakers = [worker for worker, entry in entries.items() if not entry.silence and entry.still_s >= half_s]
        if not speakers or speakers[0] != self._rank.number:
            return
        still_s = _longest_s(entries)
        if still_s >= self._say_at_s:
            self._say_at_s = AGAIN * still_s
            self._say(hang.sentence)
            if self._log is not None:
                self._log.write("hang", sentence=hang.sentence, blamed=list(hang.blamed), still_s=round(still_s, 1))
        is_gone = any(entries[worker].silence.startswith(_GONE) for worker in hang.blamed)
        # All stand still for long: what they have said of themselves is of one moment.
        is_final = hang.is_final and min(entry.still_s for entry in entries.values()) >= half_s
        if is_final or is_gone or still_s >= self._error_s:
            self._watch.report(hang.sentence, ends=True)


class Pace:
    """For how long a worker has not moved, and how long its steps usually take; looked at once a beat."""

    def __init__(self) -> None:
        self._progress: tuple[int, ...] = ()
        self._looked_s = time.monotonic()
        self._still_s = 0.0
        self._step, self._step_s = 0, 0.0
        self._steps: deque[float] = deque(maxlen=31)

    @property
    def step_s(self) -> float | None:
        """The median step; None before there have been two."""
        return statistics.median(self._steps) if self._steps else None

    def look(self, progress: tuple[int, ...], step: int) -> float:
        """Return for how long `progress` has been what it is, which was looked at a beat before."""
        now_s = time.monotonic()
        # At most two beats: a worker that was itself stopped was not there to move.
        gap_s, self._looked_s = min(now_s - self._looked_s, 2 * BEAT_S), now_s
        self._still_s = self._still_s + gap_s if progress == self._progress else 0.0
        self._progress = progress
        if step != self._step:
            if self._step and step > self._step:
                self._steps.append((now_s - self._step_s) / (step - self._step))
            self._step, self._step_s = step, now_s
        return self._still_s


def _silence(seen: _Seen) -> tuple[str, str]:
    """Return why a worker is silent and where it is, as far as that can be told from here."""
    said = seen.said
    last = said["place"] if said["still_s"] > 0 else ""  # else it has gone on from there, who knows where to
    if said["host"] != host_id():
        return f"is silent ({seen.silent_s:.1f} s)", last
    state = state_of(said["pid"])
    place: Place = read_dump(said["pid"], said["file"])
    return (state if state == _GONE else f"{state} (silent for {seen.silent_s:.1f} s)"), place.text or last


def _longest_s(entries: dict[int, Entry]) -> float:
    return max(entry.still_s for entry in entries.values())


def _where_is(worker: int) -> str:
    return f"where {worker}"

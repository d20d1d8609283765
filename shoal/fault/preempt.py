"""Stopping in order before somebody else ends us: a checkpoint, and exit code 75, within the notice given.

Asked by SIGTERM, SIGUSR1 or SIGUSR2 to any worker, or by the wall clock; all workers must stop after the same step:

1. A thread of each worker waits for signals and for the clock. What it learns it writes into the store, where the
   first request stands; the threads of the others look there twice a second.
2. A thread that knows of it arms its worker, and counts it in the store. From then on the main thread asks the store at
   the end of each step; before that, the end of a step costs one look at a flag.
3. The first worker that comes to the end of a step k and finds all armed decides: we stop after step k + `ahead`. It
   writes that before it begins step k + 1, which no other can end without it. So all of them read it in time. (On a GPU
   the processor may be one step further than what is known to be done: `ahead` is 2.)
4. All write the checkpoint of that step, and raise Stopped.
5. If the notice is about to be over before that (a step took too long, or the writing), the thread says what is left,
   and ends the process, with 75 as well. So does a second signal, at once.

Example: worker 1 of 3 gets SIGTERM in step 7, notice 30 s. Its thread writes the request 0.1 ms later, those of 0 and 2
read it within half a second, in step 9, say. Worker 2 ends step 9 first, finds 3 armed, and writes "10". Workers 0 and
1 end step 9, read 10, do step 10 with worker 2; then all three write the checkpoint of step 10. In this time 29 s are
left for it.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

import torch.distributed as dist

from shoal.comm.torch_private import own_connection
from shoal.core.errors import Stopped
from shoal.core.notice import SAME_S, SIGNALS, read_notice_s, read_wall_end
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.preempt_signals import Listener

LOOK_S = 0.5
"""How often a worker looks whether another was asked: as often as it beats (comm/alive.py)."""
_RESERVE, _MOST_RESERVE_S = 0.1, 1.0
"""How much of the notice is kept for the end itself, so that it comes before the one that was threatened."""


@dataclass(frozen=True)
class Reason:
    """Why a run is to stop."""

    what: str
    """The signal's name, or "the wall-clock limit"."""
    worker: int
    """Who was asked."""
    left_s: float
    """How much time there was, when it was asked."""

    def __str__(self) -> str:
        return self.what if self.what not in signal.Signals.__members__ else f"{self.what} to worker {self.worker}"


class Preemption:
    """Whether this worker, with all others, is to stop. Ended by `close`."""

    def __init__(
        self,
        *,
        notice_s: float,
        ends_at_s: float | None = None,
        last_words: Callable[[str], None] = lambda _: None,
        last_saved: Callable[[], int | None] = lambda: None,
    ) -> None:
        """Listen from now on. `ends_at_s` is when the time allowed is over, in seconds since 1970.

        `last_words` is told why, before the process is ended without raising anything; `last_saved` is asked then for
        the step of the last checkpoint.
        """
        self._notice_s, self._ends_at_s = notice_s, ends_at_s
        self._last_words, self._last_saved = last_words, last_saved
        self._reason: Reason | None = None
        self._deadline_s = 0.0
        self._signalled_s: float | None = None
        self._index, self._workers = 0, 1
        self._together: Together | None = None
        self._meeting = threading.Lock()
        self._is_armed = False
        self._stop_after: int | None = None
        self._step: int | None = None
        self._saving = ""
        self._is_closing = False
        self._listener = Listener(SIGNALS)
        self._thread = threading.Thread(target=self._serve, name="preemption", daemon=True)
        self._thread.start()

    def meet(self, store: dist.Store | None, *, index: int, workers: int, ahead: int = 1) -> None:
        """Stop together with the others from now on. Called by every worker, with a part of the store of their own.

        `ahead` is how many steps a worker can end while another has not begun the first of them.
        """
        with self._meeting:
            self._index, self._workers = index, workers
            self._stop_after, self._is_armed = None, False
            self._together = Together(store, workers=workers, ahead=ahead) if store is not None else None
        self._listener.poke()

    def known(self, step: int) -> Reason | None:
        """Return why all are to stop, as far as this worker knows after `step`; when they do is agreed elsewhere."""
        self._step = step
        return self._reason if self._is_armed else None

    def requested(self, step: int) -> Reason | None:
        """Return why to stop after `step`, which this worker has just done, or None: the same on all workers."""
        self._step = step
        if not self._is_armed:
            return None
        if self._stop_after is None:
            together, alone = self._together, step if self._workers == 1 else None
            self._stop_after = together.stop_after(step) if together is not None else alone
        return self._reason if self._stop_after is not None and step >= self._stop_after else None

    def stop(self, reason: Reason, step: int, save: Callable[[], object], *, run: str = "RUN") -> NoReturn:
        """Write the checkpoint of `step` by `save`, which returns when it is safe, and raise Stopped.

        `run` is what the message says to go on with.
        """
        self._saving = f"while the checkpoint of step {step} was written"
        try:
            save()
        except Exception as error:  # of any kind: this run ends now, and can be resumed from what there is
            why = f"its checkpoint could not be written: {error} {self._left()}"
            raise Stopped(f"stopped by {reason} after step {step}, but {why}") from error
        self._saving = f"after the checkpoint of step {step} was written"
        how = f"shoal train FILE --resume {run}"
        raise Stopped(f"stopped by {reason} after step {step}, with a checkpoint. Go on with: {how}")

    def close(self) -> None:
        """Listen no more."""
        self._is_closing = True
        self._listener.poke()
        self._thread.join(2 * LOOK_S)  # longer only in a call to a store that is gone: it ends with the process
        self._listener.close()

    def _serve(self) -> None:
        while not self._is_closing:
            for number in self._listener.wait(self._patience_s()):
                self._on_signal(signal.Signals(number).name)
            if not self._is_closing:
                self._look()

    def _patience_s(self) -> float:
        """Return how long to wait for a signal before looking at what else there is."""
        if self._reason is not None:
            return min(LOOK_S, self._deadline_s - time.monotonic())
        return LOOK_S if self._ends_at_s is None else min(LOOK_S, self._wall_left_s() - self._notice_s)

    def _wall_left_s(self) -> float:
        return float("inf") if self._ends_at_s is None else self._ends_at_s - time.time()

    def _on_signal(self, name: str) -> None:
        first_s, self._signalled_s = self._signalled_s, self._signalled_s or time.monotonic()
        if first_s is not None and time.monotonic() - first_s > SAME_S:
            self._end(f"ended at once by a second signal ({name}) {self._where()}.")
        if self._reason is None:
            self._take(Reason(name, self._index, min(self._notice_s, max(0.0, self._wall_left_s()))))
            self._say(f"{name}: will stop at the end of a step, with a checkpoint; a second signal ends at once.")

    def _look(self) -> None:
        if self._reason is None and self._wall_left_s() <= self._notice_s:
            self._take(Reason("the wall-clock limit", self._index, max(0.0, self._wall_left_s())))
        try:
            with self._meeting:
                self._look_together()
        except RuntimeError:  # without a store nothing can be agreed upon; who is to blame is said elsewhere
            self._together = None
        if self._reason is not None and time.monotonic() >= self._deadline_s:
            self._end(f"stopped by {self._reason}: the {self._reason.left_s:.3g} s of notice ended {self._where()}.")

    def _look_together(self) -> None:
        """Learn from the others and tell them; alone, a worker is armed as soon as it is asked."""
        together = self._together
        if self._is_armed:
            return
        if together is None:
            self._is_armed = self._reason is not None and self._workers == 1
            return
        asked = together.asked() if self._reason is None else together.ask(self._reason)
        if asked is not None:
            if self._reason is None:
                self._take(asked)
            self._reason = asked
            self._is_armed = True  # before it is counted: whoever finds all counted relies on it
            together.count_armed()

    def _take(self, reason: Reason) -> None:
        self._deadline_s = time.monotonic() + reason.left_s - min(_MOST_RESERVE_S, _RESERVE * reason.left_s)
        self._reason = reason

    def _end(self, message: str) -> NoReturn:
        """End this process from its thread: the main one may be waiting for something that does not come."""
        message = f"{message} {self._left()}"
        self._say(message)
        self._last_words(message)
        sys.stdout.flush()
        os._exit(Stopped("").exit_code)

    def _say(self, message: str) -> None:
        print(f"worker {self._index}: {message}", file=sys.stderr, flush=True)

    def _where(self) -> str:
        if self._saving:
            return self._saving
        return "before the end of its first step" if self._step is None else f"in the step after step {self._step}"

    def _left(self) -> str:
        """Return what can be resumed from."""
        step = self._last_saved()
        return f"The last checkpoint is that of step {step}." if step is not None else "There is no checkpoint."


def last_step(checkpoints: Path) -> int | None:
    """Return the step of the last checkpoint in the folder that is there whole, or None."""
    return max((step_of(path) for path in committed(checkpoints)), default=None)


class Together:
    """How workers agree through the store on a step after which all do something."""

    def __init__(self, store: dist.Store, *, workers: int, ahead: int) -> None:
        self._store = dist.PrefixStore("preempt", own_connection(store))  # its own: nobody waits for another's call
        self._workers, self._ahead = workers, ahead

    def ask(self, reason: Reason) -> Reason:
        """Ask all to stop, and return why: the first reason stands."""
        return Reason(**json.loads(self._store.compare_set("request", "", json.dumps(asdict(reason)))))

    def asked(self) -> Reason | None:
        """Return why all were asked to stop, if they were."""
        return Reason(**json.loads(self._store.get("request"))) if self._store.check(["request"]) else None

    def count_armed(self) -> None:
        """Say that this worker will ask at the end of every step."""
        self._store.add("armed", 1)

    def stop_after(self, step: int) -> int | None:
        """Return after which step all stop, deciding it if need be; None while some do not know. `step` is done."""
        if self._store.check(["stop"]):
            return int(self._store.get("stop"))
        if self._store.add("armed", 0) < self._workers:
            return None
        return int(self._store.compare_set("stop", "", str(step + self._ahead)))


@contextmanager
def preemptible(
    *,
    last_words: Callable[[str], None] = lambda _: None,
    last_saved: Callable[[], int | None] = lambda: None,
) -> Iterator[Preemption]:
    """Listen for the length of a `with` block, with the notice and the limit that the environment gives."""
    preemption = Preemption(
        notice_s=read_notice_s(), ends_at_s=read_wall_end(), last_words=last_words, last_saved=last_saved
    )
    try:
        yield preemption
    finally:
        preemption.close()

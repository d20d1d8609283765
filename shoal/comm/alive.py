"""Who is still there: every worker beats in the rendezvous store, and whoever falls silent is named to all.

An engine cannot tell. Gloo blames the neighbour whose connection closed, who may only have given up because of another,
and a worker that waits for somebody else hangs until the group's timeout. So, in threads of every worker:

1. twice a second it writes its beat into the store and reads the beats of the 16 workers after it, and the verdict;
2. a worker whose beat has not moved for `silent_s`, or whose process has ended, as those of its host can see, is
   written into the verdict, once: the first one to write wins, so all survivors name the same. A worker that fails by
   itself writes there at once; one that leaves in order says so, and is not missed. A launcher of ours, who sees a
   process end, ends the others, or tells them by way of `members`: what is heard there comes in by `give_up`;
3. when there is a verdict, pending operations of all groups are made to fail, and later ones, too (Gloo may let one
   wait for the group's timeout that is in the middle of a message: `Watch.wait` does not, nor what is `endable`);
4. the error that the main thread then gets is replaced by PeerLost with the verdict (`blame`, the end of `watching`);
5. a worker to whom the store does not answer looks around, by connecting: if the store's host answers, whoever hosts
   the store hangs; if another worker's host does, that of the store is cut off; if nobody does, it is cut off itself.

Example: worker 5 of 8 is stopped in an all-reduce. Workers 4 and 6 hang in it, the others wait for these. After 3 s the
first of them to look finds beat 5 where it was, and writes "worker 5 (node-2) has been silent for 3.0 s". Within
another half second all seven raise that. Worker 5, once continued, learns that it was given up.

A thread that holds Python's lock for longer than `silent_s` silences its worker: give more where that happens.
"""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from shoal.comm.calls import CALLS
from shoal.comm.failure import is_peer_failure
from shoal.comm.others import LEFT, Other, after, beat_of, first_line, is_gone, process_of_this, silence, them, who_is
from shoal.comm.rank import Rank
from shoal.comm.reach import ASKED_HOSTS, LOOK_AROUND_S, address_towards, answers
from shoal.comm.torch_private import end_operations, own_connection
from shoal.comm.waiter import Waiter
from shoal.core.errors import PeerLost, Stopped

BEAT_S = 0.5
SILENT_S = 3.0
_PAUSE_S = 1e-3
_PREFIX, _VERDICT = "alive", "verdict"


@contextmanager
def watching(store: dist.Store, rank: Rank, *, timeout_s: float, silent_s: float = SILENT_S) -> Iterator["Watch"]:
    """Watch the other workers, and be watched by them, for the length of a `with` block. Called by every worker.

    An error inside that is the echo of a lost worker is raised as PeerLost that names it. `timeout_s` is that of the
    groups: a worker counts as lost after `silent_s`, or half of `timeout_s` where that is less.
    """
    watch = Watch(store, rank, timeout_s=timeout_s, silent_s=min(silent_s, timeout_s / 2))
    try:
        yield watch
    except Exception as error:
        blamed = watch.blame(error)
        if blamed is None and not isinstance(error, Stopped) and not is_peer_failure(error):
            watch.report(f"{watch.name(rank.index)} failed: {type(error).__name__}: {error}")
        if blamed is None or blamed is error:
            raise
        raise blamed from error
    finally:
        watch.close()


class Watch:
    """The threads of one worker that beat and look after others. `lost` is the verdict, or None as long as all is well.

    Ended by `close`.
    """

    def __init__(self, store: dist.Store, rank: Rank, *, timeout_s: float, silent_s: float = SILENT_S) -> None:
        """Meet the others, who are waited for at most `timeout_s`, and start watching them."""
        self.lost: str | None = None
        self.on_beat: Callable[[dist.Store], None] | None = None
        """Called with the store after each beat: what `fault.watch` publishes beside it. It must not raise."""
        if not rank.member:  # else whoever forms generations has done so, and may have heard of a loss since
            CALLS.lost = None
        self._rank = rank
        self._silent_s = silent_s
        self._address = address_towards(rank.store_host, rank.store_port)
        self._decided, self._closing = threading.Event(), threading.Event()
        self._answers = 0
        self._waiter = Waiter()
        self._store = dist.PrefixStore(_PREFIX, own_connection(store))  # a connection of its own: a call may block it
        self._store.set(who_is(rank.index), json.dumps(self._introduction()))
        self._store.compare_set(_VERDICT, "", "")
        self._store.set(beat_of(rank.index), "0")
        self._others = self._met(after(rank.index, rank.workers), timeout_s)
        self._threads = [
            threading.Thread(target=target, name=target.__name__.strip("_"), daemon=True)
            for target in (self._keep_beating, self._mind_the_store)
        ]
        for thread in self._threads:
            thread.start()

    def check(self) -> None:
        """Raise PeerLost if somebody is lost."""
        error = self._lost_error()
        if error is not None:
            raise error

    def blame(self, error: BaseException) -> PeerLost | None:
        """Return the PeerLost that names who is lost, if `error` is the echo of that; or None.

        An engine's error comes at once and silence takes its time, so this may wait: `silent_s` and a little more.
        """
        if not isinstance(error, (PeerLost, RuntimeError)) or str(error) == self.lost:
            return error if isinstance(error, PeerLost) else None
        if isinstance(error, PeerLost) or is_peer_failure(error):
            if self._rank.member:  # who is lost is found out when the others are met again (fault/membership.py)
                return error if isinstance(error, PeerLost) else PeerLost(self.lost or first_line(error))
            self._wait_for_verdict()
        return self._lost_error()

    def wait(self, work: Any) -> None:
        """Wait for an operation of an engine; raise PeerLost as soon as somebody is lost, whatever the engine does.

        Without it a Gloo operation that is cut short in the middle of a message may wait for the group's timeout.
        """
        self._waiter.wait(work.wait, in_vain=self._lost_error, every_s=BEAT_S)

    def report(self, verdict: str, *, ends: bool = False) -> None:
        """Tell all workers `verdict`: who is lost, and how. The first one told stands.

        Pending operations of the others are made to fail; with `ends`, those of this worker, too.
        """
        with contextlib.suppress(RuntimeError):  # without a store there is nobody to tell
            self._decide(self._store.compare_set(_VERDICT, "", verdict).decode() or verdict, ends=ends)

    def give_up(self, why: str) -> None:
        """Take it from elsewhere that somebody is lost: pending operations of this worker are made to fail."""
        self._decide(why)

    def name(self, worker: int) -> str:
        """Return the worker with its host, as far as that is known."""
        host = _hostname() if worker == self._rank.index else self._others.get(worker, Other()).host
        number = self._rank.number_of(worker)
        return f"worker {number} ({host})" if host else f"worker {number}"

    def close(self) -> None:
        """Leave: this worker is not missed from now on, and what this process does next begins without a verdict."""
        self._closing.set()
        self._waiter.close()
        for thread in self._threads:
            thread.join(2 * BEAT_S)  # one that waits for a store that is gone ends with the process
        if not self._rank.member and CALLS.lost == self.lost:
            CALLS.lost = None

    def _met(self, workers: list[int], timeout_s: float) -> dict[int, Other]:
        """Return what the others say of themselves, once they are here."""
        end_s = time.monotonic() + timeout_s
        beats = list(map(beat_of, workers))
        pause_s = _PAUSE_S
        while not self._store.check(beats):
            CALLS.check()
            if time.monotonic() > end_s:
                missing = [worker for worker in workers if not self._store.check([beat_of(worker)])]
                number = self._rank.number_of(missing[0]) if missing else 0
                raise PeerLost(f"worker {number} has not come within {timeout_s:g} s.")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, BEAT_S / 10)
        return {worker: Other(**json.loads(self._store.get(who_is(worker)))) for worker in workers}

    def _keep_beating(self) -> None:
        """Beat and look, until closing or until there is a verdict; go on beating after it."""
        count, looked_s = 0, time.monotonic()
        try:
            while not self._closing.wait(BEAT_S):
                count += 1
                self._store.set(beat_of(self._rank.index), str(count))
                now_s = time.monotonic()
                # At most two beats: a worker that was itself stopped for long must not take the others for silent.
                self._look(min(now_s - looked_s, 2 * BEAT_S))
                looked_s = now_s
                if self.on_beat is not None:
                    self.on_beat(self._store)
            self._store.set(beat_of(self._rank.index), LEFT)
        except Exception as error:  # of any kind: the store is all there is to talk to
            if not self._closing.is_set():
                self._decide(f"{self._store_name()} is gone: {first_line(error)}")

    def _look(self, gap_s: float) -> None:
        values = self._store.multi_get([_VERDICT, *map(beat_of, self._others)])
        verdict, *beats = (value.decode() for value in values)
        self._answers += 1
        for other, beat in zip(self._others.values(), beats, strict=True):
            other.look(beat, gap_s)
        if not verdict and self.lost is None:
            verdict = self._gone_here()
        if not verdict and self.lost is None:
            silent = {w: o for w, o in self._others.items() if o.silent_s >= self._silent_s - BEAT_S}
            longest_s = max((other.silent_s for other in silent.values()), default=0.0)
            if longest_s < self._silent_s:
                return
            if self._is_cut_off(silent):
                self._decide(self._cut_off())
                return
            verdict = silence([self.name(worker) for worker in sorted(silent)], longest_s)
            verdict = self._store.compare_set(_VERDICT, "", verdict).decode()
        if verdict:
            self._decide(verdict)

    def _gone_here(self) -> str:
        """Return the verdict on workers of this host whose processes have ended without a word, or ""."""
        quiet = [worker for worker, other in sorted(self._others.items()) if other.silent_s >= 2 * BEAT_S]
        gone = [self.name(worker) for worker in quiet if is_gone(self._others[worker], _hostname())]
        if not gone:
            return ""
        verdict = f"{' and '.join(gone)} {'has' if len(gone) == 1 else 'have'} ended without a word (no such process)."
        return self._store.compare_set(_VERDICT, "", verdict).decode()

    def _introduction(self) -> dict[str, Any]:
        return {"host": _hostname(), "address": self._address, **process_of_this()}

    def _mind_the_store(self) -> None:
        """Find out why, when the store does not answer."""
        waited_s, answers, looked_s = 0.0, 0, time.monotonic()
        while not self._closing.wait(BEAT_S) and self.lost is None:
            now_s = time.monotonic()
            waited_s = waited_s + min(now_s - looked_s, 2 * BEAT_S) if answers == self._answers else 0.0
            answers, looked_s = self._answers, now_s
            if waited_s >= self._silent_s:
                self._decide(self._why_no_answer(waited_s))

    def _why_no_answer(self, waited_s: float) -> str:
        if answers(self._rank.store_host, self._rank.store_port):
            return silence([self._store_name()], waited_s)
        if self._any_answers(other for other in self._others.values() if other.address != self._rank.store_host):
            return f"{self._store_name()} cannot be reached: its link is cut, or its host is down."
        return self._cut_off()

    def _is_cut_off(self, silent: dict[int, Other]) -> bool:
        """Return whether it is this worker that is cut off: if nobody answers on two other hosts or more."""
        elsewhere = [other for other in self._others.values() if other.host != _hostname()]
        return (
            len({other.host for other in elsewhere}) > 1
            and all(any(other is one for one in silent.values()) for other in elsewhere)
            and not self._any_answers(elsewhere)
        )

    def _any_answers(self, others: Iterator[Other] | list[Other]) -> bool:
        addresses = sorted({other.address for other in others if other.address} - {self._address})
        return any(answers(address, self._rank.store_port) for address in addresses[:ASKED_HOSTS])

    def _cut_off(self) -> str:
        return (
            f"{self.name(self._rank.index)} cannot reach the others: neither the store at {self._rank.store_host} nor "
            "any worker of another host answers. Its own link is cut."
        )

    def _wait_for_verdict(self) -> None:
        """Wait until it is known who is lost; if somebody has left in order, and nobody says more, it is that one."""
        end_s = time.monotonic() + self._silent_s + 4 * BEAT_S + LOOK_AROUND_S
        left: list[str] = []
        while not self._decided.wait(2 * BEAT_S) and time.monotonic() < end_s and not left:
            left = [self.name(worker) for worker, other in sorted(self._others.items()) if other.beat == LEFT]
        if self.lost is None and left:
            self.report(f"{' and '.join(left)} left while the others still waited for {them(left)}.")

    def _lost_error(self) -> PeerLost | None:
        return PeerLost(self.lost) if self.lost is not None else None

    def _store_name(self) -> str:
        if self._rank.store_is_hosted:
            return f"the launcher, who hosts the store at {self._rank.store_host},"
        return f"{self.name(0)}, who hosts the store,"

    def _decide(self, verdict: str, *, ends: bool = True) -> None:
        """Take `verdict` as the reason why this run is over for this worker."""
        if self.lost is None:
            me = self.name(self._rank.index)
            is_me = verdict.startswith(f"{me} has been silent")
            self.lost = f"{verdict} The others have gone on without it." if is_me else verdict
            CALLS.lost = self.lost
            self._decided.set()
            if ends:
                end_operations()


def _hostname() -> str:
    return socket.gethostname()

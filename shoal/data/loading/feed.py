"""Chunks of batches, loaded by threads and handed out in their order.

1. Each thread takes the next chunk that is due, loads it into a slot of its own, and puts it where it is waited for.
2. A chunk is due when it is asked for, or up to `pace.ahead` chunks before.
3. Asking for the next chunk gives the slot of the last one back: its memory is filled again.
"""

import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial

from shoal.core.errors import DataError
from shoal.data.loading.chunk import Load, Loaded
from shoal.data.loading.pace import Pace
from shoal.data.loading.patience import Patience
from shoal.data.loading.slot import Slot


@dataclass(frozen=True)
class _Done:
    """What came of a chunk."""

    result: Loaded | BaseException
    slot: Slot
    load_s: float
    load_cpu_s: float


class Feed:
    """What `load` makes of each of `work`, once. The threads end with the iteration."""

    def __init__(
        self,
        work: Iterator[range],
        load: Load,
        *,
        threads: int,
        pace: Pace,
        new_slot: Callable[[], Slot] = Slot,
        reuse: bool = True,
        patience: Patience,
        who: str = "",
    ) -> None:
        self._work, self._load, self._pace = work, load, pace
        self._new_slot, self._reuse = new_slot, reuse
        self._patience, self._who = patience, who
        self._lock = threading.Lock()
        self._due = threading.Condition(self._lock)  # for threads: there may be something to load
        self._ready = threading.Condition(self._lock)  # for the one who asks: the chunk is there
        self._asked = 0  # chunks that were asked for
        self._begun = 0  # chunks that a thread has taken
        self._count: int | None = None  # how many there are, once that is known
        self._done: dict[int, _Done] = {}
        self._free: list[Slot] = []
        self._stopped = False
        self._threads = [threading.Thread(target=self._run, name="shoal-loader", daemon=True) for _ in range(threads)]

    def chunks(self) -> Generator[Loaded, None, None]:
        """Yield what was loaded, in order; close it when you stop before the end."""
        for thread in self._threads:
            thread.start()
        try:
            begin = time.perf_counter()
            while (done := self._next()) is not None:
                if isinstance(done.result, BaseException):
                    raise done.result
                given = time.perf_counter()
                yield done.result
                end = time.perf_counter()
                self._pace.note(
                    batches=len(done.result.batches),
                    waited_s=given - begin,
                    used_s=end - given,
                    load_s=done.load_s,
                    load_cpu_s=done.load_cpu_s,
                )
                begin = time.perf_counter()
                self._give_back(done.slot)
        finally:
            self._stop()

    def _next(self) -> _Done | None:
        """Return the next chunk in order, or None after the last one."""
        with self._lock:
            number = self._asked
            self._asked += 1
            self._due.notify()
            is_there = partial(self._ready.wait_for, lambda: number in self._done or number == self._count)
            if not self._patience.lasts(is_there):
                timeout_s = self._patience.timeout_s
                raise DataError(f"the dataset has delivered nothing{self._who} for {timeout_s:g} s (timeout_s).")
            return self._done.pop(number, None)

    def _give_back(self, slot: Slot) -> None:
        if self._reuse:
            with self._lock:
                self._free.append(slot)

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            number, steps, slot = taken
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            result: Loaded | BaseException
            try:
                slot.wait()
                result = self._load(steps, slot)
            except BaseException as error:  # whatever it is, it belongs to the worker, not to this thread
                result = error
            end = time.perf_counter()
            done = _Done(result, slot, end - begin, time.thread_time() - begin_cpu)
            self._pace.last_loads.append((threading.get_ident(), begin, end))
            with self._lock:
                self._done[number] = done
                if number == self._asked - 1:  # others are not waited for yet
                    self._ready.notify()

    def _take(self) -> tuple[int, range, Slot] | None:
        """Return the next chunk that is due, waiting for it; None when there is nothing more to do."""
        with self._lock:
            self._due.wait_for(self._has_work)
            if self._stopped or self._count is not None:
                return None
            try:
                steps = next(self._work, None)
            except BaseException as error:
                self._done[self._begun] = _Done(error, Slot(), 0.0, 0.0)
                steps = None
            if steps is None:
                self._count = self._begun
                self._ready.notify()
                self._due.notify_all()
                return None
            self._begun += 1
            return self._begun - 1, steps, self._free.pop() if self._free else self._new_slot()

    def _has_work(self) -> bool:
        return self._stopped or self._count is not None or self._begun < self._asked + self._pace.ahead

    def _stop(self) -> None:
        with self._lock:
            self._stopped = True
            self._due.notify_all()
        until = time.monotonic() + 10  # a dataset stuck in I/O must not keep the worker from ending
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))

"""Traces of single steps: those that were asked for, and those that took much longer than the others.

1. The clock keeps the moments of each step, and the traffic its collectives, until the next step: nothing more is done
   for a step that is as usual.
2. A step that took more than 3 times the median of the last 64 is written out: not in the first 10 steps of a worker,
   at most 10 in all, and one that follows soon only if it took longer than those before.
3. In steps that were asked for, memory is looked at as well: after each part of the step, and every 2 ms in between.
"""

import contextlib
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from shoal.comm.traffic import TRAFFIC
from shoal.core.events import EventLog
from shoal.core.files import write_whole
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.data.loading.pace import Report
from shoal.spec.record import JobRecord, traced_steps
from shoal.training.clock import StepClock, Taken
from shoal.training.memory import PeakMemory
from shoal.training.timeline import trace_json

Loads: TypeAlias = tuple[tuple[int, float, float], ...]
"""Which thread loaded a chunk, and from when to when."""
OUTLIER = 3.0
MOST_OUTLIERS = 10
_WARM_STEPS = 10
_RECENT = 64
_MEDIAN_EVERY = 32
"""The median of the last steps is taken anew after so many."""
_APART_S = 60.0
_WRITE_S = 10.0
"""How long a trace under way is waited for when the run ends."""
_SAMPLE_S = 0.002
_MOST_SAMPLES = 1000


def read_traced(folder: RunFolder) -> range:
    """Return the steps that are to be traced."""
    if not folder.job_toml.is_file():
        return range(0)
    return traced_steps(read_toml(JobRecord, folder.job_toml).trace)


class Tracing:
    """The traces of one worker. `loading` tells what loading has cost, where there is a loader."""

    def __init__(
        self,
        folder: RunFolder,
        *,
        index: int,
        log: EventLog,
        clock: StepClock,
        memory: PeakMemory,
        loading: Callable[[], Report | None],
    ) -> None:
        self._folder, self._index, self._log = folder, index, log
        self._clock, self._memory, self._loading = clock, memory, loading
        self._asked = read_traced(folder)
        self._watching: _MemoryWatch | None = None
        self._watched: dict[int, _MemoryWatch] = {}
        self._noted: list[tuple[int, Taken, Loads]] = []
        """Steps that were asked for: written together, so that no trace is in the way of the next step."""
        self._threads: list[threading.Thread] = []
        self._steps = 0
        self._recent: deque[float] = deque(maxlen=_RECENT)
        self._median_s = 0.0
        self._outliers, self._longest_s, self._last_s = 0, 0.0, 0.0
        self._skips = False
        """Whether the next step pays for the trace that was just written."""

    def begin(self, step: int) -> None:
        """Look closely from here on, if `step` was asked for. Called when its batch has come."""
        if step in self._asked:
            self._watching = self._watched[step] = _MemoryWatch(self._memory)
            self._clock.on_mark = self._watching.mark
            TRAFFIC.is_traced = True

    def end(self) -> None:
        """Look no more. Called when the processor is done with the step, the device perhaps not."""
        if self._watching is not None:
            self._watching.stop()
            self._watching, self._clock.on_mark, TRAFFIC.is_traced = None, None, False

    def note(self, step: int, taken: Taken, total_s: float) -> None:
        """Write a trace of a step that is done, if it was asked for or is remarkable."""
        if step in self._asked:
            self._noted.append((step, taken, self._loads()))
            if step + 1 not in self._asked:
                self._write_asked()
        elif self._is_outlier(total_s):
            why = f"outlier: {total_s / self._median_s:.1f}x the median"
            thread = threading.Thread(target=self._write, args=(step, taken, self._loads(), why), daemon=True)
            self._threads.append(thread)
            thread.start()  # the others wait for this worker, and a disk may be slow
            self._skips = True
        else:
            self._skips = False

    def close(self) -> None:
        """End what looks on, if a step was cut off, and write what was asked for as far as it is done."""
        self.end()
        with contextlib.suppress(RuntimeError):  # a GPU that has failed tells no moments, either
            self._write_asked()
        for thread in self._threads:
            thread.join(timeout=_WRITE_S)

    def _is_outlier(self, total_s: float) -> bool:
        self._steps += 1
        if self._steps <= _WARM_STEPS or self._skips:
            return False
        self._recent.append(total_s)
        if self._steps % _MEDIAN_EVERY == 0 or len(self._recent) <= _WARM_STEPS:
            self._median_s = statistics.median(self._recent)
        is_long = len(self._recent) >= _WARM_STEPS and total_s > OUTLIER * self._median_s > 0
        if not is_long or self._outliers >= MOST_OUTLIERS:
            return False
        is_soon = self._outliers > 0 and time.monotonic() - self._last_s < _APART_S
        if is_soon and total_s <= self._longest_s:
            return False
        self._outliers, self._last_s = self._outliers + 1, time.monotonic()
        self._longest_s = max(self._longest_s, total_s)
        return True

    def _loads(self) -> Loads:
        loading = self._loading()
        return loading.last_loads if loading is not None else ()

    def _write_asked(self) -> None:
        noted, self._noted = self._noted, []
        self._skips = bool(noted)
        for step, taken, loads in noted:
            self._write(step, taken, loads, "asked")
            if step in self._watched:
                self._write_memory(step, taken, self._watched.pop(step))

    def _write(self, step: int, taken: Taken, loads: Loads, why: str) -> None:
        path = self._folder.trace_of(self._index, step)
        path.parent.mkdir(exist_ok=True)
        write_whole(path, trace_json(taken, rank=self._index, step=step, loads=loads, why=why))
        self._log.write("trace", step=step, file=str(path.relative_to(self._folder.path)), why=why)

    def _write_memory(self, step: int, taken: Taken, watch: "_MemoryWatch") -> None:
        samples = watch.thinned()
        self._log.write(
            "memory",
            step=step,
            at_s=[round(at_s - taken.began_s, 6) for at_s, _, _ in samples],
            bytes=[num_bytes for _, num_bytes, _ in samples],
            labels=[label for _, _, label in samples],
        )


class _MemoryWatch:
    """What is held, from construction to `stop`: after each mark of the clock, and now and then."""

    def __init__(self, memory: PeakMemory) -> None:
        self._memory = memory
        self._samples: list[tuple[float, int, str]] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal memory", daemon=True)
        self.mark("data_s")
        self._thread.start()

    def mark(self, name: str) -> None:
        """Note what is held after what the clock calls `name`."""
        self._samples.append((time.perf_counter(), self._memory.now(), name.removesuffix("_s")))

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(timeout=1.0)

    def thinned(self) -> list[tuple[float, int, str]]:
        """Return the samples in order; of too many, those with names and every so manieth of the others."""
        every = 1 + len(self._samples) // _MOST_SAMPLES
        ordered = sorted(self._samples)
        return [sample for number, sample in enumerate(ordered) if sample[2] or number % every == 0]

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_S):
            self._samples.append((time.perf_counter(), self._memory.now(), ""))

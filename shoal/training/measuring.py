"""What a worker measures beside the parts of its steps: what travelled, what was loaded, traces of single steps.

Every 100 steps, but every 2 seconds at most, or 10 seconds, and at the end, one event says what the collectives since
the last one add up to, and one what loading has cost.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from shoal.comm.traffic import TRAFFIC
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.data.loading.pace import Report
from shoal.data.stage.tiers import file_system
from shoal.data.steps import Part
from shoal.data.view import View
from shoal.training.clock import Seconds, StepClock, Taken
from shoal.training.memory import PeakMemory
from shoal.training.tracing import Tracing

EVERY_STEPS = 100
LEAST_S, EVERY_S = 2.0, 10.0


class Measuring:
    """The measurements of one worker, and their events.

    `loading` tells what loading has cost so far, if known; `sharers` workers share memory that is resident in each.
    """

    def __init__(
        self,
        folder: RunFolder,
        *,
        index: int,
        log: EventLog,
        clock: StepClock,
        memory: PeakMemory,
        loading: Callable[[], Report | None],
        sharers: int = 1,
    ) -> None:
        self._log, self._loading, self._memory, self._sharers = log, loading, memory, sharers
        self.tracing = Tracing(folder, index=index, log=log, clock=clock, memory=memory, loading=loading)
        self._step, self._since_s = 0, time.monotonic()
        self._steps = self._samples = self._bytes = 0
        self._wait_s = 0.0
        self._before = Report(batches=0, waited_s=0.0, used_s=0.0, load_s=0.0, threads=0, ahead=0)
        self._storage = ""
        TRAFFIC.take()  # what was exchanged before the first step is of no step

    def read_from(self, data: Any) -> None:
        """Say what is read."""
        self._storage = storage_of(data)

    def begin(self, part: Part) -> None:
        """Note a part that has come, and is trained on next."""
        self._samples += len(part.samples)
        self._bytes += bytes_of(part.batch) if part.samples else 0
        self.tracing.begin(part.step)

    def end(self) -> None:
        """Note that the processor is done with the step."""
        self.tracing.end()

    def note(self, step: int, timed: Seconds, seconds: dict[str, float]) -> None:
        """Note a step that is done: `timed` told the `seconds` of its parts."""
        if isinstance(timed, Taken):
            self.tracing.note(step, timed, sum(seconds.values()))
        self._step, self._steps = step, self._steps + 1
        self._wait_s += seconds.get("data_s", 0.0)
        since_s = time.monotonic() - self._since_s
        if since_s > EVERY_S or (since_s > LEAST_S and self._steps >= EVERY_STEPS):
            self.write()

    def write(self) -> None:
        """Write what there was since the last time, if anything."""
        if not self._steps:
            return
        calls = TRAFFIC.take()
        if calls:
            self._log.write("comm", step=self._step, steps=self._steps, calls=calls)
        now, before = self._loading() or self._before, self._before
        self._log.write(
            "data",
            step=self._step,
            steps=self._steps,
            samples=self._samples,
            bytes=self._bytes,
            wait_s=round(self._wait_s, 6),
            fill_s=round(now.load_s - before.load_s, 6),
            fill_cpu_s=round(now.load_cpu_s - before.load_cpu_s, 6),
            threads=now.threads,
            depth=round(now.ahead * now.chunk_batches),
            storage=self._storage,
            peak_bytes=self._memory.read(sharers=self._sharers),
        )
        self._before, self._since_s = now, time.monotonic()
        self._steps = self._samples = self._bytes = 0
        self._wait_s = 0.0

    def close(self) -> None:
        """Write what is left."""
        self.tracing.close()
        self.write()


def storage_of(data: Any) -> str:
    """Return what `data` is read from: the kind of file system of a pack, or "dataset"."""
    return (file_system(data.pack.path) or "files") if isinstance(data, View) else "dataset"


def bytes_of(batch: Any) -> int:
    """Return the bytes of the tensors in `batch`, as deep as they lie in lists, tuples and dicts."""
    if isinstance(batch, torch.Tensor):
        return batch.nbytes
    if isinstance(batch, dict):
        return sum(map(bytes_of, batch.values()))
    return sum(map(bytes_of, batch)) if isinstance(batch, (list, tuple)) else 0

"""A worker of overhead.py: one of `shoal train`, but for its loop, which switches off what it can, and on again."""

import inspect
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.faults.overhead import WARM_STEPS
from shoal.comm.group import barrier
from shoal.core.events import EventReader
from shoal.fault.preempt import Preemption
from shoal.training import elastic, opening
from shoal.training.loop import listening
from shoal.training.run import Run
from shoal.training.worker import work

_THREADS = ("keep_beating", "mind_the_store", "preemption", "membership", "snapshots", "snapshots to a neighbour")


class Gate:
    """Stands for an object that a thread waits in, and lets the thread out of `wait` only while it is open."""

    def __init__(self, waited: Any) -> None:
        self._waited = waited
        self.is_open = threading.Event()
        self.is_open.set()

    def wait(self, timeout_s: float) -> Any:
        """Wait as the object does, and then until the gate is open."""
        result = self._waited.wait(timeout_s)
        self.is_open.wait()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._waited, name)


class Hooks:
    """How long the training thread was in what is called at each step for the sake of faults."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return `call`, timed."""

        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        return run


class Switch:
    """Turns on and off what makes a run ready for faults."""

    def __init__(self, run: Run, preemption: Preemption, watch: Any) -> None:
        self._run, self._preemption, self._keeping = run, preemption, run.snapshots._keeping
        watch._closing = Gate(watch._closing)
        preemption._listener = Gate(preemption._listener)  # type: ignore[assignment]
        self._gates: list[Gate] = [watch._closing, preemption._listener]  # type: ignore[list-item]
        self.is_on = True

    def turn(self, is_on: bool) -> None:
        """Turn everything on, or off."""
        self.is_on = is_on
        self._run.snapshots._keeping = self._keeping if is_on else None
        self._run.saving.listen(self._preemption if is_on else None)
        for gate in self._gates:
            gate.is_open.set() if is_on else gate.is_open.clear()


class Loop:
    """The loop that takes turns, in place of `train_all`."""

    def __init__(self, folder: Path, *, rounds: int, steps: int) -> None:
        self._folder, self._rounds, self._steps = folder, rounds, steps
        self._leaves: Callable[[int], bool] = lambda _: False
        self.same_s = 0.0

    def __call__(self, run: Run, *, preemption: Preemption, leaves: Any, **_: Any) -> bool:
        """Train to the end, and write down what turns took."""
        times: dict[str, list[float]] = {"on": [], "off": []}
        with listening(run, preemption), closing(run.batches()) as batches:
            ear = inspect.getclosurevars(leaves).nonlocals["ear"]
            switch, hooks = Switch(run, preemption, ear._watch), Hooks()
            self._leaves = hooks.timed(leaves)
            for name in ("after_step", "_before_update"):
                setattr(run.snapshots, name, hooks.timed(getattr(run.snapshots, name)))
            preemption.requested = hooks.timed(preemption.requested)  # type: ignore[method-assign]
            self._advance(run, batches, switch, WARM_STEPS)
            cpu_s = wall_s = hooks_s = 0.0
            for number in range(self._rounds + 1):
                for is_on in (True, False) if number % 2 else (False, True):
                    switch.turn(is_on)
                    barrier()
                    began, spent, hooks.seconds = time.perf_counter(), threads_s(), 0.0
                    self._advance(run, batches, switch, self._steps)
                    seconds = time.perf_counter() - began
                    times["on" if is_on else "off"].append(seconds / self._steps)
                    if is_on:
                        cpu_s, wall_s = cpu_s + threads_s() - spent, wall_s + seconds
                        hooks_s += hooks.seconds
            switch.turn(True)
            for _ in batches:
                raise AssertionError("the job has more steps than there are turns")
        shares = {"threads": cpu_s / wall_s, "hooks": hooks_s / wall_s}
        self._write(run, {side: seconds[1:] for side, seconds in times.items()}, shares)
        return True

    def _advance(self, run: Run, batches: Iterator[Any], switch: Switch, steps: int) -> None:
        for _ in range(steps):
            batch = next(batches)
            assert not switch.is_on or not self._leaves(run.step_count)
            run.advance(batch)

    def _write(self, run: Run, times: dict[str, list[float]], shares: dict[str, float]) -> None:
        events = EventReader(run.folder.events_of(run.rank.number)).poll()
        snapshots = [event for event in events if event["kind"] == "snapshot"][-1:]
        found = {**times, **shares, "same_s": self.same_s, "snapshots": snapshots}
        (self._folder / f"turns-{run.rank.number}.json").write_text(json.dumps(found))


def threads_s() -> float:
    """Return the seconds that the threads beside the training have computed."""
    ours = [thread for thread in threading.enumerate() if thread.name in _THREADS]
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in ours if thread.ident is not None]
    return sum(map(time.clock_gettime, clocks))


def timed(loop: Loop, check: Callable[..., None]) -> Callable[..., None]:
    """Return `check`, timed: the comparison of the workers' jobs before the first step."""

    def run(*arguments: Any, **options: Any) -> None:
        began = time.perf_counter()
        check(*arguments, **options)
        loop.same_s += time.perf_counter() - began

    return run


def main(path: str, rounds: str, steps: str) -> int:
    """Be a worker of the run at `path`."""
    loop = Loop(Path(path), rounds=int(rounds), steps=int(steps))
    vars(elastic)["train_all"] = loop
    vars(opening)["check_same_job"] = timed(loop, vars(opening)["check_same_job"])
    return work(Path(path), is_watched=False)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

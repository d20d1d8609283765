"""A worker of cost.py: one of `shoal train`, but for its loop, which measures nothing in every other turn."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.report.cost import WARM_STEPS
from shoal.comm.group import barrier
from shoal.comm.traffic import TRAFFIC
from shoal.data.steps import Part
from shoal.training import elastic, worker
from shoal.training.clock import Taken
from shoal.training.loop import listening
from shoal.training.metrics import Metrics
from shoal.training.result import StepResult
from shoal.training.run import Run

_NOTHING = Taken([("", 0.0)], [], [], began_s=0.0)


def _scalars(metrics: Metrics, part: Part, result: StepResult, _: object) -> None:
    """Write what TensorBoard is told of a step, which goes on without the rest."""
    metrics._tell(part.step, result.loss, result.batch_weight, {"forward_s": 1.0})


def _no(*_: Any, **__: Any) -> None:
    """Do nothing."""


class Switch:
    """Turns on and off what measures."""

    def __init__(self, run: Run) -> None:
        clock, measuring = run._clock, run._measuring
        self.inside_s = 0.0
        unmarked = dict.fromkeys(("mark", "note", "mark_noted", "span", "restart"), _no)
        uncounted = dict.fromkeys(("begin", "end", "add", "take_step"), _no)
        self._off: list[tuple[Any, dict[str, Any]]] = [
            (clock, unmarked | {"waiting": nullcontext, "take": lambda: _NOTHING}),
            (TRAFFIC, uncounted | {"timing": lambda *_, **__: nullcontext()}),
            (time, {"thread_time": lambda: 0.0}),
            (measuring, dict.fromkeys(("begin", "end", "note"), _no)),
            (run._metrics, {"step": partial(_scalars, run._metrics)}),
        ]
        self._on = [(of, {name: getattr(of, name) for name in calls}) for of, calls in self._off]
        for _, calls in self._on[-2:]:
            calls.update({name: self._timed(call) for name, call in calls.items()})

    def turn(self, is_on: bool) -> None:
        """Turn everything on, or off."""
        for of, calls in self._on if is_on else self._off:
            for name, call in calls.items():
                setattr(of, name, call)

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.perf_counter()
            result = call(*arguments)
            self.inside_s += time.perf_counter() - began
            return result

        return run


class Loop:
    """The loop that takes turns, in place of `train_all`."""

    def __init__(self, folder: Path, *, rounds: int, steps: int) -> None:
        self._folder, self._rounds, self._steps = folder, rounds, steps

    def __call__(self, run: Run, *, preemption: Any, **_: Any) -> bool:
        """Train to the end, and write down what turns took."""
        times: dict[bool, list[float]] = {True: [], False: []}
        computed: dict[bool, list[float]] = {True: [], False: []}
        with listening(run, preemption), closing(run.batches()) as batches:
            switch = Switch(run)
            _advance(run, batches, WARM_STEPS)
            for number in range(self._rounds + 1):
                for is_on in (True, False) if number % 2 else (False, True):
                    switch.turn(is_on)
                    if run.rank.workers > 1:
                        barrier()
                    run._clock.restart()
                    began, spent = time.perf_counter(), time.process_time()
                    _advance(run, batches, self._steps)
                    computed[is_on].append((time.process_time() - spent) / self._steps)
                    times[is_on].append((time.perf_counter() - began) / self._steps)
            switch.turn(True)
            for _ in batches:
                raise AssertionError("the job has more steps than there are turns")
        inside = switch.inside_s / (sum(times[True]) * self._steps)
        found: dict[str, Any] = {"on": times[True][1:], "off": times[False][1:], "inside": inside}
        found |= {"cpu_on": computed[True][1:], "cpu_off": computed[False][1:]}
        (self._folder / f"turns-{run.rank.number}.json").write_text(json.dumps(found))
        return True


def _advance(run: Run, batches: Iterator[Any], steps: int) -> None:
    for _ in range(steps):
        run.advance(next(batches))


def main(path: str, rounds: str, steps: str) -> int:
    """Be a worker of the run at `path`."""
    for module in (elastic, worker):
        vars(module)["train_all"] = Loop(Path(path), rounds=int(rounds), steps=int(steps))
    return worker.work(Path(path), is_watched=False)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""What a run writes about itself: an event a step, and TensorBoard scalars from worker 0."""

import math
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path

from shoal.core.events import STEP_PARTS, EventLog
from shoal.data.steps import Part
from shoal.training.scalars import Scalars
from shoal.training.step import StepResult

# To TensorBoard: more points than that nobody can see, and each costs 0.2 ms. The events have every step.
_SCALARS_EVERY_S = 0.1


class Metrics:
    """The event log of one worker, and its TensorBoard scalars if it is worker 0."""

    def __init__(self, log: EventLog, *, tensorboard: Path | None, unit: str, generation: int = 0) -> None:
        self._log = log
        self._unit = unit
        self._next_scalars = 0.0
        self._scalars = Scalars(tensorboard) if tensorboard else None
        self._log.write("start", pid=os.getpid(), host=platform.node(), generation=generation)

    def step(self, part: Part, result: StepResult, seconds: Mapping[str, float]) -> None:
        """Write the event of the step that `part` was for; `seconds` are its parts, data included."""
        total_s = sum(seconds.values())
        self._log.write(
            "step",
            step=part.step,
            epoch=part.epoch,
            loss=_finite(result.loss),
            part_loss=_finite(result.part_loss),
            samples=len(part.samples),
            weight=result.weight,
            batch_weight=result.batch_weight,
            step_s=round(total_s, 6),
            **{name: round(seconds.get(name, 0.0), 6) for name in STEP_PARTS},
            **_norms(result),
            **_met(result, part.index),
        )
        if self._scalars and time.monotonic() >= self._next_scalars:
            self._next_scalars = time.monotonic() + _SCALARS_EVERY_S
            values = {"loss": result.loss, f"{self._unit}_per_s": result.batch_weight / total_s}
            values |= {f"seconds/{name.removesuffix('_s')}": seconds.get(name, 0.0) for name in STEP_PARTS}
            self._scalars.write(part.step, values)

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the result of an evaluation after `step` steps."""
        self._log.write("eval", step=step, metrics={name: _finite(value) for name, value in metrics.items()})
        if self._scalars:
            self._scalars.write(step, {f"eval/{name}": value for name, value in metrics.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of the user's own."""
        numbers = {name: float(value) for name, value in values.items()}
        self._log.write("log", step=step, values={name: _finite(number) for name, number in numbers.items()})
        if self._scalars:
            self._scalars.write(step, numbers)

    def end(self, step: int, peak_bytes: int, state_bytes: Mapping[str, int] | None = None) -> None:
        """Write that the worker finished, the most it ever held, and by kind the model state that it holds at rest."""
        self._log.write("end", step=step, peak_bytes=peak_bytes, state_bytes=dict(state_bytes or {}))

    def close(self) -> None:
        """Flush and close what is open."""
        if self._scalars:
            self._scalars.close()


def _met(result: StepResult, index: int) -> dict[str, object]:
    """Return how this worker has met the others, where that is not all-reduce."""
    if result.met is None:
        return {}
    met = result.met
    return {"took_part": list(met.took_part), "met_weight": met.weight, "staleness": met.staleness, "part": index}


def _norms(result: StepResult) -> dict[str, object]:
    norms: dict[str, object] = {}
    if result.gradient_norm is not None:
        norms["gradient_norm"] = _finite(result.gradient_norm)
    if result.parameter_norms:
        norms["parameter_norms"] = {name: _finite(value) for name, value in result.parameter_norms.items()}
    return norms


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None

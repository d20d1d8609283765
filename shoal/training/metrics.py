"""What a run writes about itself: an event a step, and TensorBoard scalars from worker 0."""

import math
import os
import platform
import time
from collections.abc import Mapping

from shoal.core.events import EventLog
from shoal.data.steps import Part
from shoal.training.loggers.logger import Kept
from shoal.training.loggers.rows import eval_values, step_values
from shoal.training.loggers.tensorboard import TensorBoard
from shoal.training.result import StepResult

# To TensorBoard: more points than that nobody can see, and each costs 0.2 ms or more. The events have every step.
_SCALARS_EVERY_S, _SCALARS_SHARE = 0.1, 0.002


class Metrics:
    """The event log of one worker, and its TensorBoard scalars if it is worker 0."""

    def __init__(self, log: EventLog, *, tensorboard: TensorBoard | None, unit: str, generation: int = 0) -> None:
        self._log = log
        self._unit = unit
        self._next_scalars = 0.0
        self._scalars = tensorboard
        self._passed_over: tuple[int, float, float | None, float, Mapping[str, float]] | None = None
        self._log.write("start", pid=os.getpid(), host=platform.node(), generation=generation)

    def begin(self, step: int, config: Mapping[str, object]) -> None:
        """Go on after `step`: what TensorBoard has of later ones is of an attempt before."""
        if self._scalars:
            self._scalars.start(config, Kept(step=step))

    def step(self, part: Part, result: StepResult, seconds: Mapping[str, float]) -> None:
        """Write the event of the step that `part` was for; `seconds` are its parts, data included."""
        is_plain = result.gradient_norm is None and result.met is None and not result.parameter_norms
        self._log.write_step(
            part.step,
            epoch=part.epoch,
            loss=result.loss,
            part_loss=result.part_loss,
            samples=len(part.samples),
            weight=result.weight,
            batch_weight=result.batch_weight,
            seconds=seconds,
            more={} if is_plain else _norms(result) | _met(result, part.index),
        )
        self._tell(part.step, result.loss, result.batch_weight, seconds)

    def plain_step(self, step: int, *, loss: float, samples: int, step_s: float, waited_s: float) -> None:
        """Write the event of a step of a Program, of which only this much is known: waiting, and computing."""
        seconds = {"comm_s": waited_s, "forward_s": step_s - waited_s}
        self._log.write_step(
            step,
            epoch=0,
            loss=loss,
            part_loss=loss,
            samples=samples,
            weight=float(samples),
            batch_weight=float(samples),
            seconds=seconds,
        )
        self._tell(step, loss, samples, seconds)

    def _tell(self, step: int, loss: float | None, weight: float, seconds: Mapping[str, float]) -> None:
        """Write the numbers of a step for TensorBoard, if it is time for some."""
        if self._scalars is None:
            return
        now_s = time.monotonic()
        self._passed_over = (step, time.time(), loss, weight, seconds)
        if now_s < self._next_scalars:
            return
        self._show()
        took_s = time.monotonic() - now_s
        self._next_scalars = now_s + max(_SCALARS_EVERY_S, took_s / _SCALARS_SHARE)

    def _show(self) -> None:
        if self._scalars is not None and self._passed_over is not None:
            step, time_s, loss, weight, seconds = self._passed_over
            values = step_values(loss, weight, seconds, step_s=sum(seconds.values()), unit=self._unit)
            self._scalars.scalars(step, time_s, values)
        self._passed_over = None

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the result of an evaluation after `step` steps."""
        self._log.write("eval", step=step, metrics={name: _finite(value) for name, value in metrics.items()})
        if self._scalars:
            self._scalars.scalars(step, time.time(), eval_values(metrics))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of the user's own."""
        numbers = {name: float(value) for name, value in values.items()}
        self._log.write("log", step=step, values={name: _finite(number) for name, number in numbers.items()})
        if self._scalars:
            self._scalars.scalars(step, time.time(), numbers)

    def end(self, step: int, peak_bytes: int, state_bytes: Mapping[str, int] | None = None) -> None:
        """Write that the worker finished, the most it ever held, and by kind the model state that it holds at rest."""
        self._log.write("end", step=step, peak_bytes=peak_bytes, state_bytes=dict(state_bytes or {}))

    def close(self) -> None:
        """Flush and close what is open; the last step is shown in any case."""
        if self._scalars:
            self._show()
            self._scalars.close("")


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

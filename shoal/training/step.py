"""One step: forward, backward, synchronise, optimizer, for whatever part of the global batch this worker has.

1. The part is cut into micro-batches (`pieces`).
2. The weight W of the global batch is known (samples) or summed over the workers while the forward pass runs.
3. Each micro-batch's loss, a mean, is scaled by its weight / W: summed over micro-batches and workers, the gradient is
   the weighted mean over the global batch. An engine runs forward and backward: `whole`, or `pipelined`.
4. The gradient is clipped by its global norm if the job says so; optimizer and schedule step.

Example: parts of 3 and 1 samples, micro-batches of 2. Worker 0 scales by 2/4 and 1/4, worker 1 by 1/4; the sum of the
three scaled means is the mean over 4.

On a GPU nothing is read back during a step: the processor runs ahead, and what a step was is known when somebody asks.
"""

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from shoal.comm.calls import CALLS
from shoal.comm.first_calls import comparing_calls
from shoal.comm.group import all_reduce_sum
from shoal.comm.mesh import Position
from shoal.comm.traffic import TRAFFIC
from shoal.core.errors import JobError, NonFiniteLoss, PeerLost
from shoal.data.steps import Part
from shoal.parallel.gradients import clip, squares
from shoal.parallel.layout import Layout
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.sync.allreduce import PendingTotal
from shoal.sync.mode import Met
from shoal.training.clock import Seconds, StepClock
from shoal.training.pieces import Cutter, Piece
from shoal.training.recording import Recording
from shoal.training.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What a step was."""

    loss: float
    """The mean over the global batch, the same on every worker."""
    part_loss: float | None
    """The mean over this worker's part; None if that weighs nothing, or another stage of the pipeline knows it."""
    weight: float
    batch_weight: float
    gradient_norm: float | None = None
    """Of the whole model, before clipping; None where nobody asked for it."""
    parameter_norms: dict[str, float] = field(default_factory=dict)
    """The norm of each parameter's gradient, where asked for."""
    met: Met | None = None
    """How this worker has met the others, where that is not all-reduce."""


@dataclass(frozen=True)
class Losses:
    """What an engine's forward and backward found: scaled losses, summed to what they are of the global batch."""

    of_pieces: torch.Tensor | None
    """One for each piece, where this worker computed them: not on the other stages of a pipeline."""
    of_batch: torch.Tensor | None = None
    """Where the engine has summed them over all workers already."""


class Engine(Protocol):
    """How forward and backward are run."""

    def forward_backward(self, pieces: Sequence[Piece], scale: Callable[[Piece], float], step: int) -> Losses:
        """Leave this worker's slices of the global batch's gradient in the parameters."""

    def forward(self, pieces: Sequence[Piece], score: Callable[[Any, Piece], torch.Tensor]) -> list[torch.Tensor]:
        """Return score(output, piece) of each piece, without gradients; empty where another stage knows it."""


class Stepped(Protocol):
    """A step that is done, or under way."""

    @property
    def part(self) -> Part:
        """What it was done on."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The same, as it was computed."""

    @property
    def result(self) -> StepResult:
        """What the step was: known when it is done, so asking waits."""

    @property
    def seconds(self) -> Seconds:
        """Where its time went."""

    def losses(self) -> list[float]:
        """Return the scaled loss of each piece, where this worker knows it."""


class Pending:
    """A step that is under way on the device; what it was is on its way to the processor."""

    def __init__(
        self,
        part: Part,
        pieces: Sequence[Piece],
        losses: torch.Tensor | None,
        totals: torch.Tensor,
        *,
        weight: float,
        batch_weight: float,
        has_norm: bool,
        names: tuple[str, ...],
    ) -> None:
        self.part, self.pieces = part, pieces
        self.seconds: Seconds = dict
        self._weight, self._batch_weight = weight, batch_weight
        self._has_norm, self._names = has_norm, names
        self._num_losses = 0 if losses is None else len(losses)
        together = totals if losses is None else torch.cat([losses.to(totals), totals])
        # Copied now: asked for later, it would wait behind the next step, which has been started by then.
        self._numbers = together.detach().to("cpu", non_blocking=True)
        self._copied = _event_on(together.device)

    def losses(self) -> list[float]:
        """Wait until the step is done, and return the scaled loss of each piece, where this worker knows it."""
        return self._read()[: self._num_losses]

    @functools.cached_property
    def result(self) -> StepResult:
        """What the step was: known when it is done, so asking waits."""
        losses, (loss, *squares) = self.losses(), self._read()[self._num_losses :]
        return StepResult(
            loss=loss,
            part_loss=sum(losses) * self._batch_weight / self._weight if losses and self._weight else None,
            weight=self._weight,
            batch_weight=self._batch_weight,
            gradient_norm=math.sqrt(squares[0]) if self._has_norm else None,
            parameter_norms={name: math.sqrt(value) for name, value in zip(self._names, squares[1:], strict=False)},
        )

    def _read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers.tolist()


def _event_on(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


class Stepper:
    """Does the steps of one worker."""

    def __init__(
        self,
        state: TrainState,
        job: Job,
        plan: Plan,
        engine: Engine,
        *,
        position: Position,
        index: int,
        device: torch.device,
        clock: StepClock,
        cutter: Cutter,
        recording: Recording | None = None,
    ) -> None:
        self._state, self._job, self._plan, self._engine = state, job, plan, engine
        self._position, self._index, self._device, self._clock = position, index, device, clock
        self._cutter = cutter
        self._recording = recording
        self._names = state.layout.all_names if recording else ()
        self._has_norm = job.clip_norm is not None or recording is not None

    def step(self, part: Part, batch: Any) -> Pending:
        """Train on `batch`, this worker's `part` of the global batch. Called by every worker."""
        CALLS.step = part.step
        pieces = self._cutter.cut(part, batch)
        weight = sum(piece.weight for piece in pieces)
        batch_weight = self._batch_weight(part, weight)
        with comparing_calls(self._plan.engine) if self._state.step == 0 and self._plan.workers > 1 else nullcontext():
            losses = self._engine.forward_backward(pieces, lambda piece: piece.weight / batch_weight(), part.step)
        if self._state.step == 0:
            refuse_unused(self._state.layout, self._plan.workers)
        self._finish_gradients()
        totals = self._totals(losses)
        if self._recording is not None:
            self._recording.note_gradients()
        pending = Pending(
            part,
            pieces,
            losses.of_pieces,
            totals,
            weight=weight,
            batch_weight=batch_weight(),
            has_norm=self._has_norm,
            names=self._names,
        )
        if self._device.type == "cpu":  # reading costs nothing here, and the step is not applied where it is not finite
            check_finite(pending, pending.result.loss, worker=self._index, applied=False)
        self._update(totals)
        pending.seconds = self._clock.take()
        return pending

    def _batch_weight(self, part: Part, weight: float) -> Callable[[], float]:
        """Return what will tell the weight of the global batch: known, or summed while the forward pass runs."""
        if self._job.weight is None:
            return lambda: float(part.batch_samples)
        if self._plan.workers == 1:
            return lambda: _positive(weight, part.step)
        pending = PendingTotal(weight if self._position.is_first_of_data else 0.0)
        return lambda: _positive(pending.wait(), part.step)

    def _totals(self, losses: Losses) -> torch.Tensor:
        """Return the loss of the global batch and, where wanted, the squares of the gradient's norms, on the device."""
        if self._plan.workers == 1 and not self._has_norm and losses.of_pieces is not None:
            return losses.of_pieces.sum(0, keepdim=True)  # the usual step on one GPU: not one kernel more than needed
        totals = torch.zeros(2 + len(self._names), dtype=torch.float64, device=self._device)
        if losses.of_batch is None and losses.of_pieces is not None:
            totals[0] = losses.of_pieces.sum() / self._plan.mesh.tensor
        if self._has_norm:
            layout = self._state.layout
            parts = squares(layout.parameters, layout.parts)
            totals[1] = torch.stack(list(parts.values())).sum() if parts else 0.0
            for number, name in enumerate(self._names, start=2):
                if name in parts:
                    totals[number] = parts[name]
        if self._plan.workers > 1 and (losses.of_batch is None or self._has_norm):
            with self._clock.waiting(), TRAFFIC.timing("all-reduce", "engine", totals):
                all_reduce_sum(totals).wait()
        if losses.of_batch is not None:
            totals[0] = losses.of_batch
        return totals

    def _finish_gradients(self) -> None:
        if self._plan.workers > 1:
            with self._clock.waiting():
                self._state.layout.finish_gradients()

    def _update(self, totals: torch.Tensor) -> None:
        state = self._state
        if self._job.clip_norm is not None:
            clip(state.layout.parameters, totals[1].sqrt(), self._job.clip_norm)
        state.slices.bring()
        state.optimizer.step()
        if state.schedule is not None:
            state.schedule.step()
        state.optimizer.zero_grad(set_to_none=True)
        state.slices.drop()
        state.step += 1
        self._clock.mark("optimizer_s")

    def contexts(self) -> AbstractContextManager[object]:
        """Return what a step or an evaluation runs in."""
        return self._state.layout.contexts()


def refuse_unused(layout: Layout, workers: int) -> None:
    """Name the parameters that got no gradient: engines that wait for all of them fail without naming any."""
    unused = [name for name, p in layout.parameters.items() if p.grad is None]
    if unused and workers > 1:
        raise JobError(
            f"{len(unused)} parameter(s) got no gradient at step 1: {', '.join(unused[:5])}. With several workers "
            f"every parameter must take part in the loss. Remove them, or set requires_grad=False."
        )


def check_finite(pending: Stepped, loss: float, *, worker: int, applied: bool) -> None:
    """Raise NonFiniteLoss on the worker whose samples are to blame, PeerLost on the others, if `loss` is not finite."""
    if math.isfinite(loss):
        return
    step = pending.part.step
    losses = zip(pending.pieces, pending.losses(), strict=False)
    bad = [piece for piece, value in losses if not math.isfinite(value)]
    if not bad:
        raise PeerLost(f"step {step}: the loss of another worker is not finite.")
    samples = [sample for piece in bad for sample in piece.samples]
    raise NonFiniteLoss(
        f"the loss of step {step} is not finite (NaN or infinite) on worker {worker}, samples "
        f"{', '.join(map(str, samples[:64]))}{' ...' if len(samples) > 64 else ''}. "
        f"The step was {'applied' if applied else 'not applied'}."
    )


def _positive(weight: float, step: int) -> float:
    if not weight > 0:
        raise JobError(f"the global batch of step {step} weighs 0: weight(batch) counted nothing in all of it.")
    return weight

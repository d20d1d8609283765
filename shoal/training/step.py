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

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoal.comm.calls import CALLS
from shoal.comm.first_calls import comparing_calls
from shoal.comm.group import all_reduce_sum
from shoal.comm.mesh import Position
from shoal.comm.traffic import TRAFFIC
from shoal.core.errors import JobError
from shoal.data.steps import Part
from shoal.parallel.gradients import clip, squares
from shoal.parallel.layout import Layout
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.sync.allreduce import PendingTotal
from shoal.training.clock import StepClock
from shoal.training.pieces import Cutter, Piece
from shoal.training.recording import Recording
from shoal.training.result import Pending, check_finite
from shoal.training.state import TrainState


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


@dataclass(frozen=True)
class Computed:
    """A step as far as forward and backward go."""

    part: Part
    pieces: Sequence[Piece]
    losses: Losses
    weight: float
    batch_weight: float


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
        self._names = tuple(state.layout.trained) if recording else ()
        self._has_norm = job.clip_norm is not None or recording is not None
        self._is_first = True  # also where the run was gone on with: these are other processes

    def step(self, part: Part, batch: Any) -> Pending:
        """Train on `batch`, this worker's `part` of the global batch. Called by every worker."""
        computed = self._compute(part, batch)
        if self._state.step == 0:
            refuse_unused(self._state.layout, self._plan.workers)
        self._finish_gradients()
        totals = self._totals(computed.losses)
        if self._recording is not None:
            self._recording.note_gradients()
        pending = self._pending(computed, totals)
        if self._device.type == "cpu":  # reading costs nothing here, and the step is not applied where it is not finite
            check_finite(pending, pending.result.loss, worker=self._index, applied=False)
        self._update(totals)
        pending.seconds = self._clock.take()
        return pending

    def _compute(self, part: Part, batch: Any) -> Computed:
        """Run forward and backward."""
        CALLS.step = part.step
        pieces = self._cutter.cut(part, batch)
        weight = sum(piece.weight for piece in pieces)
        batch_weight = self._batch_weight(part, weight)
        compares, self._is_first = self._is_first and self._plan.workers > 1, False
        with comparing_calls(self._plan.engine) if compares else nullcontext():
            losses = self._engine.forward_backward(pieces, lambda piece: piece.weight / batch_weight(), part.step)
        return Computed(part, pieces, losses, weight, batch_weight())

    def _pending(self, computed: Computed, totals: torch.Tensor) -> Pending:
        """Have what the step was brought to the processor."""
        return Pending(
            computed.part,
            computed.pieces,
            computed.losses.of_pieces,
            totals,
            weight=computed.weight,
            batch_weight=computed.batch_weight,
            has_norm=self._has_norm,
            names=self._names,
        )

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
        # Who holds the whole model has its sums by now, and waits for nobody.
        with nullcontext() if self._plan.mesh.keeps_whole else self._clock.waiting():
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


def _positive(weight: float, step: int) -> float:
    if not weight > 0:
        raise JobError(f"the global batch of step {step} weighs 0: weight(batch) counted nothing in all of it.")
    return weight

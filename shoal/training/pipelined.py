"""Forward and backward where the layers are cut into stages: see `parallel.pipeline`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from shoal.parallel.layout import Layout
from shoal.parallel.pipeline.schedule import Pipeline
from shoal.parallel.precision import precision_context
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.calling import MicroBatch
from shoal.training.clock import Moment, StepClock
from shoal.training.objective import scaled_loss
from shoal.training.pieces import Piece
from shoal.training.step import Losses


class Action(NamedTuple):
    """The forward or the backward of one micro-batch through one piece."""

    kind: str
    """forward, backward, or weights: the part of a backward that was put off."""
    micro_batch: int
    piece: int
    start: Moment
    end: Moment


class Pipelined:
    """Runs all micro-batches of a step through this worker's stage."""

    def __init__(self, layout: Layout, job: Job, plan: Plan, *, device: torch.device, clock: StepClock) -> None:
        assert layout.mesh is not None
        self._job, self._plan, self._device, self._clock = job, plan, device, clock
        self._pipeline = Pipeline(
            layout.roots,
            schedule=plan.schedule,
            group=layout.mesh.get_group("pipeline"),
            device=device,
            on_action=self._note,
            now=clock.now,
        )
        self.actions: list[Action] = []
        """What this worker did in the last step, in its order."""

    def forward_backward(self, pieces: Sequence[Piece], scale: Callable[[Piece], float], step: int) -> Losses:
        """Leave this worker's slices of the global batch's gradient in the parameters."""

        def loss(output: Any, number: int) -> torch.Tensor:
            with precision_context(self._plan.precision, self._device, cache=False):
                return scaled_loss(self._job, output, pieces[number], lambda: scale(pieces[number]))

        self.actions = []
        losses = self._pipeline.step([(piece.batch, MicroBatch(piece, step)) for piece in pieces], loss)
        self._clock.mark("bubble_s")
        self._count_busy()
        return Losses(None if losses is None else torch.stack(losses))

    def forward(self, pieces: Sequence[Piece], score: Callable[[Any, Piece], torch.Tensor]) -> list[torch.Tensor]:
        """Return score(output, piece) of each piece, without gradients; empty on all stages but the last."""
        micro_batches = [(piece.batch, MicroBatch(piece, 0)) for piece in pieces]
        scores = self._pipeline.evaluate(micro_batches, lambda output, number: score(output, pieces[number]))
        return [] if scores is None else scores

    def _note(self, kind: str, number: int, piece: int, start: Moment, end: Moment) -> None:
        self.actions.append(Action(kind, number, piece, start, end))

    def _count_busy(self) -> None:
        """Count what was computed as that: the rest of the pipeline's time is bubble."""
        for action in self.actions:
            part = "forward_s" if action.kind == "forward" else "backward_s"
            self._clock.span(part, action.start, action.end, micro_batch=action.micro_batch)

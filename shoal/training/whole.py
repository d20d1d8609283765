"""Forward and backward where every worker runs all layers: alone, replicated (DDP), sharded (FSDP2) or divided."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch.distributed.fsdp import FSDPModule

from shoal.parallel.apply import engine_of
from shoal.parallel.exact.batch_norm import counting
from shoal.parallel.layout import Layout
from shoal.parallel.precision import precision_context
from shoal.parallel.shard import begin_micro_batch
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.clock import StepClock
from shoal.training.meeting import Meeting
from shoal.training.objective import Objective
from shoal.training.pieces import Piece
from shoal.training.replicas import Replicas
from shoal.training.step import Losses


class Whole:
    """Runs one micro-batch after the other through the whole model."""

    def __init__(
        self, layout: Layout, job: Job, plan: Plan, *, device: torch.device, clock: StepClock, meeting: Meeting
    ) -> None:
        self._layout, self._job, self._plan = layout, job, plan
        self._device, self._clock = device, clock
        self._kind = engine_of(plan)
        compiles = plan.compile and plan.mesh.keeps_whole
        # A codec would round the loss, too.
        carries_loss = self._kind == "ddp" and meeting.feedback is None
        self._objective = Objective(layout.model, job, carries_loss=carries_loss, compiles=compiles)
        self.sending: Callable[[], AbstractContextManager[object]] = nullcontext
        """Entered around the last backward of a step, whose gradients can be sent as they become ready."""
        self._replicas: Replicas | None = None
        if self._kind == "ddp":
            self._replicas = meeting.replicas(self._objective, clock=clock)

    def forward_backward(self, pieces: Sequence[Piece], scale: Callable[[Piece], float], step: int) -> Losses:
        """Leave this worker's slices of the global batch's gradient in the parameters."""
        losses = []
        for number, piece in enumerate(pieces, start=1):
            is_last = number == len(pieces)
            if self._layout.draws:
                self._layout.dropout.begin(step=step, samples=piece.samples)
            with self._synchronised(is_last), counting(bool(piece.weight)):
                with self._precision():
                    loss = (self._replicas or self._objective)(piece, lambda piece=piece: scale(piece))
                self._clock.mark("forward_s")
                self._backward(loss, is_last)
            losses.append(loss.detach())
        return Losses(torch.stack(losses), self._objective.take_global_loss())

    def forward(self, pieces: Sequence[Piece], score: Callable[[Any, Piece], torch.Tensor]) -> list[torch.Tensor]:
        """Return score(output, piece) of each piece, without gradients."""
        scores = []
        for piece in pieces:
            with self._precision():
                output = call_model(self._layout.model, self._job, piece.batch)
                scores.append(score(output, piece))
        return scores

    def _backward(self, loss: torch.Tensor, is_last: bool) -> None:
        if self._replicas is None:
            with self.sending() if is_last else nullcontext():
                loss.backward()  # type: ignore[no-untyped-call]
        else:
            self._replicas.backward(loss)
            if is_last:
                self._replicas.finish()
                return
        self._clock.mark("backward_s")

    def _precision(self) -> AbstractContextManager[object]:
        return precision_context(self._plan.precision, self._device, cache=self._kind != "fsdp")

    def _synchronised(self, is_last: bool) -> AbstractContextManager[object]:
        if self._kind == "fsdp":
            begin_micro_batch(cast(FSDPModule, self._layout.model), zero=self._plan.zero, is_last=is_last)
        return nullcontext() if is_last or self._replicas is None else self._replicas.accumulating()

"""One step: forward, backward, synchronise, optimizer, for whatever part of the global batch this worker has.

1. The part is cut into micro-batches, and each is weighed (samples, or what the job's `weight` counts).
2. The weight W of the global batch is known (samples) or summed over the workers while the forward pass runs.
3. Each micro-batch's loss, a mean, is scaled by its weight / W: summed over micro-batches and workers, the gradient is
   the weighted mean over the global batch. Only the last micro-batch synchronises.
4. The gradient is clipped by its global norm if the job says so; optimizer and schedule step.

Example: parts of 3 and 1 samples, micro-batches of 2. Worker 0 scales by 2/4 and 1/4, worker 1 by 1/4; the sum of the
three scaled means is the mean over 4.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.nn.parallel import DistributedDataParallel

from shoal.core.errors import JobError, NonFiniteLoss, PeerLost
from shoal.data.loader import Part
from shoal.parallel.precision import precision_context
from shoal.parallel.replicate import apply_replicate, refuse_batch_norm
from shoal.spec.job import Job
from shoal.spec.parts import parts
from shoal.spec.plan import Plan
from shoal.sync.allreduce import AllReduce, PendingTotal
from shoal.training.batch import micro_batches, to_device, weigh
from shoal.training.clock import StepClock
from shoal.training.objective import Objective
from shoal.training.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """What a step was."""

    loss: float
    """The mean over the global batch, the same on every worker."""
    part_loss: float | None
    """The mean over this worker's part; None if that weighs nothing."""
    weight: float
    batch_weight: float


@dataclass(frozen=True)
class Piece:
    """A micro-batch: some samples of the part, and what they weigh."""

    batch: Any
    samples: tuple[int, ...]
    weight: float


class Stepper:
    """Does the steps of one worker."""

    def __init__(
        self, state: TrainState, job: Job, plan: Plan, *, rank: int, device: torch.device, clock: StepClock
    ) -> None:
        self._state, self._job, self._plan = state, job, plan
        self._rank, self._device, self._clock = rank, device, clock
        self._parameters = [p for p in state.model.parameters() if p.requires_grad]
        self._objective = Objective(state.model, job, workers=plan.workers)
        self._replica: Objective | DistributedDataParallel = self._objective
        if plan.workers > 1:
            refuse_batch_norm(state.model, reason=f"on each of {plan.workers} workers")
            self._replica = apply_replicate(self._objective, hook=AllReduce(on_bucket=clock.note).hook)
        samples = parts(min(job.batch_size, len(job.data)), plan.shares)[rank]
        if plan.batch.micro_batch is not None and samples > plan.batch.micro_batch:
            refuse_batch_norm(state.model, reason="with --micro-batch")

    def step(self, part: Part, batch: Any) -> StepResult:
        """Train on `batch`, this worker's `part` of the global batch. Called by every worker."""
        pieces = self._pieces(part, batch)
        weight = sum(piece.weight for piece in pieces)
        batch_weight = self._batch_weight(part, weight)
        losses = self._forward_backward(pieces, batch_weight)
        result = StepResult(
            loss=self._objective.global_loss(losses),
            part_loss=sum(losses) * batch_weight() / weight if weight else None,
            weight=weight,
            batch_weight=batch_weight(),
        )
        self._check_finite(part.step, result, pieces, losses)
        if self._state.step == 0 and self._plan.workers > 1:
            self._refuse_unused()
        self._update()
        return result

    def _pieces(self, part: Part, batch: Any) -> list[Piece]:
        """Return the micro-batches that weigh something; one empty piece if none does, for the others wait for us."""
        pieces = []
        if part.samples:
            batch, first = to_device(batch, self._device), 0
            for micro, count in micro_batches(
                batch, num_samples=len(part.samples), micro_batch=self._plan.batch.micro_batch
            ):
                weight = weigh(self._job, micro, num_samples=count)
                pieces.append(Piece(micro, part.samples[first : first + count], weight))
                first += count
        return [piece for piece in pieces if piece.weight] or [Piece(None, (), 0.0)]

    def _batch_weight(self, part: Part, weight: float) -> Callable[[], float]:
        """Return what will tell the weight of the global batch: known, or summed while the forward pass runs."""
        if self._job.weight is None:
            return lambda: float(part.batch_samples)
        if self._plan.workers == 1:
            return lambda: _positive(weight, part.step)
        pending = PendingTotal(weight)
        return lambda: _positive(pending.wait(), part.step)

    def _forward_backward(self, pieces: list[Piece], batch_weight: Callable[[], float]) -> list[float]:
        """Leave the global batch's gradient in the parameters; return the scaled loss of each piece."""
        losses = []
        for number, piece in enumerate(pieces, start=1):
            with self._synchronised(number == len(pieces)):
                with precision_context(self._plan.precision, self._device):
                    loss = self._replica(piece.batch, lambda piece=piece: piece.weight / batch_weight())
                self._clock.mark("forward_s")
                loss.backward()
                if number == len(pieces) and self._plan.workers > 1:
                    self._clock.mark_noted("backward_s", "comm_s")
                else:
                    self._clock.mark("backward_s")
            losses.append(loss.detach())
        return [float(loss.item()) for loss in losses]

    def _synchronised(self, last: bool) -> AbstractContextManager[object]:
        if last or isinstance(self._replica, Objective):
            return nullcontext()
        return cast(AbstractContextManager[object], self._replica.no_sync())

    def _check_finite(self, step: int, result: StepResult, pieces: list[Piece], losses: list[float]) -> None:
        if math.isfinite(result.loss):
            return
        bad = [piece for piece, loss in zip(pieces, losses, strict=True) if not math.isfinite(loss)]
        if not bad:
            raise PeerLost(f"step {step}: the loss of another worker is not finite.")
        samples = [sample for piece in bad for sample in piece.samples]
        raise NonFiniteLoss(
            f"the loss of step {step} is not finite (NaN or infinite) on worker {self._rank}, samples "
            f"{', '.join(map(str, samples[:64]))}{' ...' if len(samples) > 64 else ''}. The step was not applied."
        )

    def _refuse_unused(self) -> None:
        """DDP waits for every gradient: name those that do not come, before it fails without naming them."""
        unused = [n for n, p in self._state.model.named_parameters() if p.requires_grad and p.grad is None]
        if unused:
            raise JobError(
                f"{len(unused)} parameter(s) got no gradient at step 1: {', '.join(unused[:5])}. With several workers "
                f"every parameter must take part in the loss. Remove them, or set requires_grad=False."
            )

    def _update(self) -> None:
        if self._job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._job.clip_norm)
        self._state.optimizer.step()
        if self._state.schedule is not None:
            self._state.schedule.step()
        self._state.optimizer.zero_grad(set_to_none=True)
        self._state.step += 1
        self._clock.mark("optimizer_s")


def _positive(weight: float, step: int) -> float:
    if not weight > 0:
        raise JobError(f"the global batch of step {step} weighs 0: weight(batch) counted nothing in all of it.")
    return weight

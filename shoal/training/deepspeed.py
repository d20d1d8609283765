"""Forward, backward and update by DeepSpeed, so that a step is what it is everywhere: see `step`.

1. Each micro-batch's loss is scaled by its weight in the global batch, and by the number of workers, by which DeepSpeed
   divides the sum of their gradients.
2. DeepSpeed is told which micro-batch is the last of the step, as a partial batch has fewer.
3. The loss is summed over the workers and looked at before the update; the gradient's norm is known after it.

What DeepSpeed does between two moments that it lets us see is counted where it happens: gradients that travel during
backward and parameters that travel after the optimizer are `comm_s`, as far as this thread, or on a GPU the stream that
computes, waits for them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from shoal.comm.group import all_reduce_sum
from shoal.comm.traffic import TRAFFIC
from shoal.core.errors import JobError
from shoal.data.steps import Part
from shoal.parallel.deepspeed.start import DeepSpeedLayout
from shoal.parallel.exact.batch_norm import counting
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.clock import StepClock
from shoal.training.objective import scaled_loss
from shoal.training.pieces import Piece
from shoal.training.result import Pending, check_finite
from shoal.training.step import Losses, Stepper


class DeepSpeed:
    """Runs one micro-batch after the other through DeepSpeed's engine."""

    def __init__(self, layout: DeepSpeedLayout, job: Job, plan: Plan, *, clock: StepClock) -> None:
        self._layout, self._job, self._workers, self._clock = layout, job, plan.workers, clock
        self._is_first = True

    def forward_backward(self, pieces: Sequence[Piece], scale: Callable[[Piece], float], step: int) -> Losses:
        """Leave this worker's slices of the global batch's gradient with DeepSpeed."""
        losses = []
        seen = _Seen(self._layout) if self._is_first else None
        self._is_first = False
        for number, piece in enumerate(pieces, start=1):
            if self._layout.draws:
                self._layout.dropout.begin(step=step, samples=piece.samples)
            self._layout.engine.set_gradient_accumulation_boundary(number == len(pieces))
            with counting(bool(piece.weight)):
                loss = self._layout.engine(piece.batch, lambda output, piece=piece: self._loss(output, piece, scale))
                self._clock.mark("forward_s")
                self._layout.engine.backward(loss, scale_wrt_gas=False)
                self._clock.mark("backward_s")
            losses.append(loss.detach() / self._workers)
        if seen is not None:
            seen.refuse_unused()
        return Losses(torch.stack(losses))

    def forward(self, pieces: Sequence[Piece], score: Callable[[Any, Piece], torch.Tensor]) -> list[torch.Tensor]:
        """Return score(output, piece) of each piece, without gradients."""
        return [self._layout.engine(piece.batch, lambda out, piece=piece: score(out, piece)) for piece in pieces]

    def _loss(self, output: Any, piece: Piece, scale: Callable[[Piece], float]) -> torch.Tensor:
        return scaled_loss(self._job, output, piece, lambda: scale(piece) * self._workers)


class _Seen:
    """Which parameters get a gradient: DeepSpeed takes those that get none for zeros, and weight decay moves them."""

    def __init__(self, layout: DeepSpeedLayout) -> None:
        self._layout = layout
        self._names: set[str] = set()
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: self._names.add(name))  # type: ignore[no-untyped-call]
            for name, parameter in layout.parameters.items()
        ]

    def refuse_unused(self) -> None:
        """Name those that got none, and look no longer."""
        for hook in self._hooks:
            hook.remove()
        unused = [name for name in self._layout.parameters if name not in self._names]
        if unused:
            raise JobError(
                f"{len(unused)} parameter(s) got no gradient at step 1: {', '.join(unused[:5])}. With DeepSpeed every "
                "parameter must take part in the loss. Remove them, or set requires_grad=False."
            )


class DeepSpeedStepper(Stepper):
    """Does the steps of one worker, by DeepSpeed."""

    def step(self, part: Part, batch: Any) -> Pending:
        """Train on `batch`, this worker's `part` of the global batch. Called by every worker."""
        computed = self._compute(part, batch)
        totals = self._totals(computed.losses)
        if self._device.type == "cpu":
            done = self._pending(computed, totals)
            check_finite(done, done.result.loss, worker=self._index, applied=False)
        self._update(totals)
        done = self._pending(computed, totals)  # with the norm, which is known now
        done.seconds = self._clock.take()
        return done

    def _totals(self, losses: Losses) -> torch.Tensor:
        """Return the loss of the global batch, room for the squared norm, and the squares of parameters if wanted."""
        assert losses.of_pieces is not None
        totals = torch.zeros(2 + len(self._names), dtype=torch.float64, device=self._device)
        totals[0] = losses.of_pieces.sum()
        if self._plan.workers > 1:
            with self._clock.waiting(), TRAFFIC.timing("all-reduce", "engine", totals):
                all_reduce_sum(totals).wait()
        for number, name in enumerate(self._names, start=2):
            gradient = self._deep.whole_gradient(name)
            totals[number] = 0.0 if gradient is None else gradient.double().square().sum()
        return totals

    def _update(self, totals: torch.Tensor) -> None:
        state, engine = self._state, self._deep.engine
        engine.step()
        if self._has_norm:
            totals[1] = torch.as_tensor(engine.get_global_grad_norm(), dtype=torch.float64).square()
        if state.schedule is not None:
            state.schedule.step()
        state.step += 1
        self._clock.mark("optimizer_s")

    @property
    def _deep(self) -> DeepSpeedLayout:
        layout = self._state.layout
        assert isinstance(layout, DeepSpeedLayout)
        return layout

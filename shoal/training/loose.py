"""A step where workers do not meet in backward, but by a mode of `sync.mode`: those who may be apart.

1. Forward and backward, as ever, but on this worker alone: the gradient is the mean over its own part.
2. The mode is given what that weighs. It does the rest: meeting the others or not, clipping, optimizer, schedule.
3. What it returns says which step comes next. The run goes on there; a worker that was late leaves steps out.
4. Evaluations, checkpoints and all else for which all must hold the same state come after boundaries (`boundaries`).

Example: parts of 3 and 1 samples, micro-batches of 2. Worker 0 scales by 2/3 and 1/3, worker 1 by 1: both have means of
their own. The mode weighs them with 3/4 and 1/4.
"""

import math
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import HashStore, PrefixStore, Store

from shoal.comm.alive import Watch
from shoal.comm.calls import CALLS
from shoal.comm.group import all_reduce_sum
from shoal.core.errors import ConfigError
from shoal.core.events import EventLog
from shoal.data.loading.patience import never
from shoal.data.steps import Part, StepLoader
from shoal.sync.mode import Met, Mine, Mode, Overlapping, Place, Tickets, Trained
from shoal.training.boundaries import Boundaries
from shoal.training.clock import Seconds, StepClock
from shoal.training.loader import PartLoader, open_loader, ticketed
from shoal.training.meeting import Meeting
from shoal.training.modes import open_mode
from shoal.training.pieces import Cutter, Piece
from shoal.training.result import StepResult, check_finite
from shoal.training.step import refuse_unused
from shoal.training.whole import Whole

if TYPE_CHECKING:
    from shoal.training.run import Run


@dataclass(frozen=True)
class Done:
    """A step that is done, on this worker."""

    part: Part
    pieces: list[Piece]
    result: StepResult
    seconds: Seconds
    of_pieces: list[float]

    def losses(self) -> list[float]:
        """Return what each piece adds to the mean over this worker's part."""
        return self.of_pieces


class Loose:
    """Does the steps of one worker that meets the others by a mode. `open` before the first, `close` at the end."""

    def __init__(
        self, run: "Run", store: Store | None, *, clock: StepClock, cutter: Cutter, log: EventLog, watch: Watch | None
    ) -> None:
        self._run, self._clock, self._cutter, self._log, self._watch = run, clock, cutter, log, watch
        self._store: Store = store if store is not None else HashStore()
        self.boundaries = Boundaries(run.job, run.plan, store, index=run.rank.index)
        self.is_settled = True
        """Whether all workers hold the same state now, after a boundary."""
        self.is_common = True
        """Whether what this worker holds is the run's state after `run.step_count` steps."""
        self.mode: Mode | None = None
        self.tickets: Tickets | None = None
        self._ahead: int | None = None
        """With tickets: the step of the part that this worker has taken for later; None if there is none."""

    def open(self, meeting: Meeting, restored: dict[str, torch.Tensor], *, is_kept: bool) -> None:
        """Begin, with the parameters as they are: worker 0's. Called by every worker.

        `restored`: what a mode of the run that is gone on with has kept, by name. `is_kept`: workers keep states in
        memory, to go on from when one is lost.
        """
        run, state = self._run, self._run.state
        self._begin_alike()
        trained = Trained(
            parameters=state.layout.parameters,
            buffers=dict(run.model.named_buffers()),
            optimizer=state.optimizer,
            schedule=state.schedule,
            clip_norm=run.job.clip_norm,
        )
        place = Place(
            sync=run.plan.sync,
            rank=run.rank,
            store=PrefixStore("mode", self._store),
            device=run.device,
            log=self._log,
            is_boundary=self.boundaries.is_boundary,
            first_step=run.step_count + 1,
            last_step=run.job.total_steps,
            seed=run.job.seed,
            timeout_s=run.plan.timeout_s,
            watch=self._watch,
            waiting=self._clock.waiting,
            changing=run.snapshots.change,
            reached=run.snapshots.reach,
        )
        if run.plan.sync.mode == "server" and is_kept:
            self.boundaries.pace(run.step_count, check=self._watch.check if self._watch is not None else lambda: None)
        self.mode = open_mode(trained, place, meeting)
        self.tickets = getattr(self.mode, "tickets", None)
        if isinstance(self.mode, Overlapping) and isinstance(run.engine, Whole):
            run.engine.sending = self.mode.sending
            if not run.plan.compile:  # which does not look at hooks of modules
                self.mode.fetch_beside(run.model)
        with torch.no_grad():
            for name, tensor in self.mode.tensors():
                if name in restored:
                    tensor.copy_(restored[name])

    @torch.no_grad()
    def _begin_alike(self) -> None:
        """Give all workers the parameters and buffers of worker 0, as DDP does."""
        if self._run.rank.workers == 1:
            return
        model, is_first = self._run.model, self._run.rank.index == 0
        for tensor in [*model.parameters(), *model.buffers()]:
            if not is_first:
                tensor.zero_()
            all_reduce_sum(tensor.detach() if tensor.dtype != torch.bool else tensor.detach().view(torch.uint8)).wait()

    def step(self, part: Part, batch: Any) -> Done:
        """Train on `batch`, this worker's `part` of a global batch, and be where the next step begins."""
        CALLS.step = part.step
        assert self.mode is not None
        if part.index < 0:  # nothing but the boundary
            return self._done(part, [], [], self._settled(part.step))
        pieces = self._cutter.cut(part, batch)
        weight = sum(piece.weight for piece in pieces)
        found = self._run.engine.forward_backward(pieces, lambda piece: piece.weight / (weight or 1.0), part.step)
        assert found.of_pieces is not None
        if self._run.state.step == 0:
            refuse_unused(self._run.state.layout, self._run.plan.workers)
        losses = found.of_pieces.tolist()
        loss = math.fsum(losses) if weight else 0.0
        self._check(part, pieces, losses, loss)
        batch_weight = float(part.batch_samples) if self._run.job.weight is None else 0.0
        mine = Mine(part.step, weight, loss, len(part.samples), part.index, batch_weight)
        met = self.mode.meet(mine)
        if self.tickets is not None:
            met = self._behind(met, part.step)
        return self._done(part, pieces, losses, met, weight=weight, loss=loss)

    def parts(self) -> Generator[Part, None, None]:
        """Yield the parts that this worker has tickets for, to the end of the job."""
        run, tickets = self._run, self.tickets
        assert tickets is not None

        def open_one(index: int) -> StepLoader:
            check = self._watch.check if self._watch is not None else never
            return open_loader(run.job, run.plan, index=index, first_step=1, device=run.device, check=check)

        def on_ahead(step: int | None) -> None:
            self._ahead = step

        return ticketed(
            tickets,
            PartLoader(open_one),
            last_step=run.job.total_steps,
            done=lambda: run.step_count,
            is_boundary=self.boundaries.is_boundary,
            on_ahead=on_ahead,
        )

    def contexts(self) -> AbstractContextManager[object]:
        """Return what a step or an evaluation runs in."""
        return self._run.layout.contexts()

    def saved(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what the mode keeps, by name."""
        if self.mode is not None:
            yield from self.mode.tensors()

    def leaves(self, is_asked: bool) -> bool:
        """Return whether all leave now, after a boundary that somebody has asked for. Called between steps."""
        if is_asked:
            self.boundaries.leave.ask(self._run.step_count)
        return self.is_settled and self.boundaries.leave.is_boundary(self._run.step_count)

    def need_settled(self, what: str) -> None:
        """Raise ConfigError if workers are apart now."""
        if not self.is_settled:
            mode = self._run.plan.sync.mode
            raise ConfigError(
                f"{what} after step {self._run.step_count}, with sync.mode={mode!r}: workers are apart then. Do it "
                "where they meet: Job.eval_every_steps, or checkpoint.every_steps in the plan."
            )

    def finish_fetching(self) -> None:
        """Have all parameters in place, for whoever looks at them between two steps."""
        if isinstance(self.mode, Overlapping):
            self.mode.finish_fetching()

    def close(self) -> None:
        """End the mode."""
        if self.mode is not None:
            self.mode.close()

    def _check(self, part: Part, pieces: list[Piece], losses: list[float], loss: float) -> None:
        """Raise NonFiniteLoss before anybody else has anything of it."""
        result = StepResult(loss, None, 0.0, 0.0)
        check_finite(Done(part, pieces, result, dict, losses), loss, worker=self._run.rank.number, applied=False)

    def _behind(self, met: Met, step: int) -> Met:
        """Settle where the part that this worker has taken for later lies behind a boundary."""
        ahead = self._ahead or self._run.job.total_steps + 1
        for boundary in range(step, ahead):
            if self.boundaries.is_boundary(boundary):
                settled = self._settled(boundary)
                return Met(met.loss, met.weight, met.took_part, settled.next_step, met.staleness, is_common=True)
        return Met(met.loss, met.weight, met.took_part, max(ahead, step), met.staleness)

    def _settled(self, step: int) -> Met:
        assert self.tickets is not None
        with self._clock.waiting():
            return self.tickets.settle(step)

    def _done(
        self, part: Part, pieces: list[Piece], losses: list[float], met: Met, *, weight: float = 0.0, loss: float = 0.0
    ) -> Done:
        self._clock.mark("optimizer_s")
        done = self._run.state.step = met.next_step - 1
        self.is_settled = self.boundaries.is_boundary(done) and (self.tickets is None or met.is_common)
        self.is_common = self.is_settled or met.is_common
        if self.is_settled:
            self.boundaries.settle(done)
        result = StepResult(
            loss=met.loss,
            part_loss=loss if weight else None,
            weight=weight,
            batch_weight=met.weight,
            met=met,
        )
        return Done(part, pieces, result, self._clock.take(), losses)

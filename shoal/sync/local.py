"""Workers train for themselves, and meet every H steps: local SGD, or DiLoCo with an outer optimizer.

1. Each step is the job's own optimizer, schedule and clipping, on this worker's own gradient.
2. After H steps (`local_steps`), and at boundaries, workers meet. Each has gone from the parameters of the meeting
   before, the anchor, to its own. The differences, anchor - parameters, are averaged, each weighted by what the
   samples weigh that the worker has trained on since. They go through the plan's codec, if it has one.
3. The average is a gradient for the outer optimizer: "average" takes it as it is, so that the parameters become the
   mean of the workers' own. "nesterov" does what torch.optim.SGD(nesterov=True) does: momentum over meetings.
4. All workers begin again at the new anchor. What the inner optimizer keeps stays each worker's own, but at a boundary
   it is averaged, too, with the same weights: then one saved state is right for all. So are running statistics of
   batch norms.

Between two meetings nothing travels: with H = 50, and AdamW, a fiftieth of the bytes, and messages, of an all-reduce.
With H = 1, average, and SGD without momentum and clipping, it is all-reduce: anchor - lr * sum(w_i g_i) / W.

Example: 2 workers at 1.0, who have trained on 30 and 10 samples since, and are at 0.6 and 1.4. The differences are 0.4
and -0.4; weighted, 0.2. "average" puts both at 0.8. "nesterov" with lr 0.7 and momentum 0.9 has 0.2 as its momentum
after the first meeting, and goes 0.7 * (0.2 + 0.9 * 0.2) from 1.0, to 0.734.

A worker that is lost takes its way since the last meeting with it; the others do those steps again from the anchor.
"""

import time
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from shoal.comm.group import all_reduce_sum
from shoal.core.errors import PlanError
from shoal.sync.mode import Met, Mine, Place, Trained

AddUp = Callable[[Tensor], None]
"""Sums a tensor over all workers, in place. Called by every worker; all then have the same bits."""


class Local:
    """Local steps, and what comes of them at meetings. Opened by every worker, with equal parameters on all of them.

    `send` sums the differences, one row of all numbers, maybe through a codec; `add_up` sums what must be exact.
    """

    def __init__(self, trained: Trained, place: Place, *, add_up: AddUp, send: AddUp) -> None:
        self._trained, self._place, self._sync = trained, place, place.sync
        self._add_up, self._send = add_up, send
        self._parameters = list(trained.parameters.values())
        wrong = [name for name, each in trained.parameters.items() if not each.is_floating_point()]
        if wrong:
            raise PlanError(f"sync.mode='local' averages, and {wrong[0]!r} has no floating-point numbers.")
        self._dtype = torch.float64 if any(p.dtype == torch.float64 for p in self._parameters) else torch.float32
        self._anchor = self._row()
        self._momentum = torch.zeros_like(self._anchor) if self._sync.outer == "nesterov" else None
        self._weight = 0.0
        """What the samples weigh that this worker has trained on since the last meeting."""

    def meet(self, mine: Mine) -> Met:
        """Do a step of this worker's own; and meet the others, if that is due."""
        self._step()
        self._weight += mine.weight
        is_boundary = self._place.is_boundary(mine.step)
        if not is_boundary and mine.step % self._sync.local_steps:
            number = self._place.rank.number
            return Met(mine.loss, mine.weight, (number,) if mine.weight else (), mine.step + 1)
        with self._place.waiting():
            return self._meet(mine, is_boundary=is_boundary)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the momentum of the outer optimizer, by parameter."""
        if self._momentum is not None:
            for name, part in zip(self._trained.parameters, self._parts(self._momentum), strict=True):
                yield f"momentum/{name}", part

    def close(self) -> None:
        """Nothing runs for it."""

    def _step(self) -> None:
        trained = self._trained
        if trained.clip_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, trained.clip_norm)
        trained.optimizer.step()
        if trained.schedule is not None:
            trained.schedule.step()
        trained.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _meet(self, mine: Mine, *, is_boundary: bool) -> Met:
        begin_s = time.perf_counter()
        weights, since, loss = self._told(mine)
        if since > 0:
            share = self._weight / since
            row = self._anchor - self._row()
            row.mul_(share)
            self._send(row)
            self._go(row)
            if is_boundary:
                self._settle(share)
        self._weight = 0.0
        self._place.log.write(
            "meeting",
            step=mine.step,
            weight=since,
            bytes=self._anchor.nbytes if since > 0 else 0,
            seconds=round(time.perf_counter() - begin_s, 6),
        )
        took_part = tuple(self._place.rank.number_of(i) for i, weight in enumerate(weights) if weight > 0)
        return Met(loss, sum(weights), took_part, mine.step + 1, is_common=True)

    def _told(self, mine: Mine) -> tuple[list[float], float, float]:
        """Return what each worker's part of this step weighs, what all have done since the last meeting, and the loss.

        That is the mean over this step's global batch. Called by every worker.
        """
        workers = self._place.rank.workers
        told = torch.zeros(workers + 2, dtype=torch.float64)
        told[self._place.rank.index] = mine.weight
        told[workers], told[workers + 1] = self._weight, mine.weight * mine.loss
        if workers > 1:
            work = all_reduce_sum(told)
            if self._place.watch is not None:
                self._place.watch.wait(work)
            else:
                work.wait()
        *weights, since, losses = told.tolist()
        return weights, since, losses / sum(weights) if sum(weights) else 0.0

    def _go(self, gradient: Tensor) -> None:
        """Move the anchor by the outer optimizer's step, and the parameters there."""
        if self._momentum is None:
            self._anchor.sub_(gradient)
        else:
            self._momentum.mul_(self._sync.outer_momentum).add_(gradient)
            gradient.add_(self._momentum, alpha=self._sync.outer_momentum)
            self._anchor.sub_(gradient, alpha=self._sync.outer_lr)
        self._place.changing()
        for parameter, part in zip(self._parameters, self._parts(self._anchor), strict=True):
            parameter.copy_(part)

    def _settle(self, share: float) -> None:
        """Give all workers the average of what their optimizers, and batch norms, keep."""
        kept = [tensor for tensor in self._kept() if tensor.is_floating_point()]
        if not kept or self._place.rank.workers == 1:
            return
        row = torch.cat([tensor.detach().reshape(-1).to(self._anchor) for tensor in kept]).mul_(share)
        self._add_up(row)
        begin = 0
        for tensor in kept:
            tensor.copy_(row[begin : begin + tensor.numel()].view(tensor.shape))
            begin += tensor.numel()

    def _kept(self) -> Iterator[Tensor]:
        """Yield the tensors that workers keep of their own, in the same order on all of them."""
        for parameter in self._parameters:
            state = self._trained.optimizer.state.get(parameter, {})
            keys = [key for key in sorted(state) if isinstance(state[key], Tensor) and key != "step"]
            yield from (state[key] for key in keys)
        statistics = ("running_mean", "running_var")
        yield from (buffer for name, buffer in self._trained.buffers.items() if name.endswith(statistics))

    def _row(self) -> Tensor:
        """Return the numbers of all parameters, one after the other."""
        return torch.cat([parameter.detach().reshape(-1).to(self._dtype) for parameter in self._parameters])

    def _parts(self, row: Tensor) -> Iterator[Tensor]:
        """Yield the part of a row that is each parameter's, in its shape: a view."""
        begin = 0
        for parameter in self._parameters:
            yield row[begin : begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()

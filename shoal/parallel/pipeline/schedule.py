"""Pipeline parallelism: the micro-batches of a step run through the pieces of a model, on torch's schedules.

1. Each worker of the pipeline axis holds one piece, or with the interleaved schedule several: piece k is on worker
   k % workers. Every worker has all micro-batches of the step, for the masks and positions that are not sent.
2. The shapes of what crosses are known beforehand, from fake tensors. Schedules are kept by the shapes they are for.
3. The last piece computes the loss; backwards run as the schedule says, and gradients add up over the micro-batches.
4. Parameters that two pieces need have then two parts of a gradient: `TiedGradients` adds them.

Example: 2 workers, 4 micro-batches, 1f1b. Worker 0: F0 F1 B0 F2 B1 F3 B2 B3. Worker 1: F0 B0 F1 B1 F2 B2 F3 B3.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
)
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.collectives import subgroup
from shoal.core.errors import PlanError
from shoal.parallel.pipeline.split import Split
from shoal.parallel.pipeline.stage import Stage
from shoal.parallel.pipeline.torch_private import MicroBatchStage, OnAction, Shape, signature, sum_over

_KEPT = 4
"""How many schedules are kept: full and partial steps, in training and in evaluation. Each has its receive buffers."""

Score = Callable[[Any, int], Tensor]
"""score(output, number) returns a scalar for the model's output of micro-batch `number`."""


class Pipeline:
    """This worker's pieces of a pipeline. Built by every worker of the pipeline axis, whose group is `group`.

    `stages` are Stages, each as it is, in DistributedDataParallel, or sharded by fully_shard. `on_action` is told of
    every forward and backward when it is done, with the moments by `now`; what is left of a step's time is bubble.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        *,
        schedule: str,
        group: Any,
        device: torch.device,
        on_action: OnAction | None = None,
        now: Callable[[], Any] = time.perf_counter,
    ) -> None:
        self._modules = list(stages)
        self._stages = [stage_of(module) for module in stages]
        self._schedule, self._group, self._device = schedule, group, device
        self._on_action, self._now = on_action, now
        self._schedules: OrderedDict[Any, Any] = OrderedDict()
        self._micro_batches: Sequence[Any] = ()
        self._score: Score | None = None
        self.is_last = self._stages[-1].piece == self._stages[-1].pieces - 1
        expected = list(range(group.rank(), self._stages[0].pieces, group.size()))
        assert [stage.piece for stage in self._stages] == expected, "piece k lies on worker k % workers"
        if (len(stages) > 1) != (schedule == "interleaved"):
            raise PlanError(
                f"schedule={schedule!r} with {len(stages)} pieces a worker. Several pieces a worker (chunks of 2 or "
                "more) and schedule='interleaved' go together."
            )

    def step(self, micro_batches: Sequence[Any], loss: Score) -> list[Tensor] | None:
        """Run forward and backward of all micro-batches; return their losses on the last worker, None elsewhere.

        Called by every worker of the pipeline axis, with the same micro-batches. The gradients are those of the sum of
        the losses. A wait that outlasts the group's timeout raises, and the gradients are then undefined.
        """
        schedule = self._prepared(micro_batches, loss, is_training=True)
        return self._run(schedule.step, len(micro_batches))

    def evaluate(self, micro_batches: Sequence[Any], score: Score) -> list[Tensor] | None:
        """Return the scores of all micro-batches on the last worker, None elsewhere. Called as `step` is."""
        schedule = self._prepared(micro_batches, score, is_training=False)
        with torch.no_grad():
            scores = self._run(schedule.eval, len(micro_batches))
        for module in self._modules:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.reshard()  # no backward will do it
        return scores

    def _run(self, step: Callable[..., Any], count: int) -> list[Tensor] | None:
        losses: list[Tensor] = []
        try:
            if self.is_last:
                step(target=torch.arange(count), losses=losses)
            else:
                step()
        finally:
            self._micro_batches, self._score = (), None
        return [loss.detach().squeeze(0) for loss in losses] if self.is_last else None

    def _prepared(self, micro_batches: Sequence[Any], score: Score, *, is_training: bool) -> Any:
        self._micro_batches, self._score = micro_batches, score
        key = (is_training, *map(signature, micro_batches), *(stage.training for stage in self._stages))
        if key not in self._schedules:
            self._schedules[key] = self._build(micro_batches, is_training=is_training)
            while len(self._schedules) > _KEPT:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _build(self, micro_batches: Sequence[Any], *, is_training: bool) -> Any:
        name = self._schedule if is_training else "gpipe"
        count, workers = len(micro_batches), self._group.size()
        stages = [
            self._torch_stage(module, stage, micro_batches)
            for module, stage in zip(self._modules, self._stages, strict=True)
        ]
        if len(stages) > 1:
            kind: Any = _several(name, count, workers)
            return kind(stages, count, loss_fn=_same, scale_grads=False)
        kind = _single(name, count, workers)
        of_one = kind in (ScheduleGPipe, Schedule1F1B)
        return kind(stages[0] if of_one else stages, count, loss_fn=_same, scale_grads=False)

    def _torch_stage(self, module: nn.Module, stage: Stage, micro_batches: Sequence[Any]) -> MicroBatchStage:
        crossings = [stage.outline(micro_batch).crossings for micro_batch in micro_batches]
        is_last = stage.piece == stage.pieces - 1
        one_loss = (Shape((1,), torch.float32),)
        return MicroBatchStage(
            module,
            piece=stage.piece,
            pieces=stage.pieces,
            device=self._device,
            group=self._group,
            received=[_on_meta(crossing[stage.piece - 1] if stage.piece else ()) for crossing in crossings],
            sent=[_on_meta(one_loss if is_last else crossing[stage.piece]) for crossing in crossings],
            run=self._finish if is_last else self._forward,
            on_action=self._on_action,
            now=self._now,
        )

    def _forward(self, forward: Callable[..., Any], received: tuple[Tensor, ...], number: int) -> Any:
        return forward(*received, batch=self._micro_batches[number])

    def _finish(self, forward: Callable[..., Any], received: tuple[Tensor, ...], number: int) -> Tensor:
        assert self._score is not None
        output = self._forward(forward, received, number)
        return torch.stack([self._score(output, number)])  # no view: torch's zero-bubble cannot detach one


class TiedGradients:
    """The parameters that several pieces need, and the groups of the workers that hold each.

    Built by every worker of the pipeline axis, at the same place in its program: it makes process groups.
    """

    def __init__(self, stages: Sequence[nn.Module], split: Split, *, group: Any) -> None:
        self._stages = [stage_of(module) for module in stages]
        holders = {
            name: sorted({k % group.size() for k, names in enumerate(split.parameters) if name in names})
            for name in split.tied
        }
        groups = {
            workers: subgroup(group, workers)
            for workers in sorted(set(map(tuple, holders.values())))
            if group.rank() in workers
        }
        self._groups = {name: groups[tuple(w)] for name, w in holders.items() if group.rank() in w}

    def sum(self) -> None:
        """Add up the gradients of each tied parameter over the workers that hold it. Called by all of them."""
        works = []
        for name, group in self._groups.items():
            for stage in self._stages:
                if name in stage.places:
                    module, attribute = stage.places[name][0]
                    parameter = getattr(module, attribute)
                    if parameter.requires_grad:
                        works.append(sum_over(group, parameter))
        for work in works:
            work.wait()


def stage_of(module: nn.Module) -> Stage:
    """Return the Stage in `module`: itself, sharded or not, or what DistributedDataParallel wraps."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    assert isinstance(inner, Stage)
    return inner


def _single(name: str, count: int, workers: int) -> Any:
    """Return the schedule for one piece a worker; where there are too few micro-batches for it, a simpler one."""
    if name == "zero-bubble" and _has_equal_rounds(count, workers):
        return ScheduleInterleavedZeroBubble
    return ScheduleGPipe if name == "gpipe" or count < workers else Schedule1F1B


def _several(name: str, count: int, workers: int) -> Any:
    return ScheduleInterleaved1F1B if name == "interleaved" and _has_equal_rounds(count, workers) else ScheduleLoopedBFS


def _has_equal_rounds(count: int, workers: int) -> bool:
    return count % max(1, count // workers) == 0


def _same(loss: Tensor, target: Tensor) -> Tensor:
    del target
    return loss


def _on_meta(shapes: Sequence[Shape]) -> list[Tensor]:
    return [shape.tensor(torch.device("meta")).requires_grad_() for shape in shapes]

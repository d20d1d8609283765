"""A plan laid over a LightningModule: what runs its steps, and where its gradients meet.

1. All workers begin with worker 0's weights. The plan is laid over the module as over a job's model
   (parallel/apply.py); how gradients meet is decided as in any run (training/meeting.py).
2. A step of the module is called through `Steps`, an nn.Module around it: the engines, which look at forward calls, see
   one call each, whatever the step calls inside.
3. The loss of a worker's part is scaled by its share of the global batch, so that the sum over workers is the mean.
4. After the last backward of a step the gradients are brought together; the optimizer steps on what the worker holds.

A module stays laid out for the life of the process: `trainer.fit` and then `trainer.test` find the same.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed import Store
from torch.distributed.fsdp import FSDPModule

from shoal.comm.group import all_reduce_sum, begin_alike
from shoal.comm.mesh import device_mesh, position_of
from shoal.comm.rank import Rank
from shoal.core.errors import ConfigError
from shoal.parallel.apply import apply_plan, engine_of
from shoal.parallel.exact.batch_norm import counting
from shoal.parallel.gradients import clip, squares
from shoal.parallel.optimizer import Slices
from shoal.parallel.precision import precision_context
from shoal.parallel.shard import begin_micro_batch
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.sync.compressed import compress_shards
from shoal.training.clock import StepClock
from shoal.training.links import Place, located
from shoal.training.meeting import open_meeting, open_shards
from shoal.training.replicas import Replicas
from shoal.training.step import refuse_unused

_CUT: WeakSet[nn.Module] = WeakSet()
"""The modules of this process that hold slices."""


class Steps(nn.Module):
    """Calls a step of the module inside by its name."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return what the step returns."""
        return getattr(self.module, name)(*args, **kwargs)


class Laid:
    """One worker's side of a module under a plan. Made by every worker."""

    def __init__(
        self,
        module: nn.Module,
        plan: Plan,
        *,
        rank: Rank,
        store: Store | None,
        device: torch.device,
        seed: int,
        tensor_plan: dict[str, str] | None = None,
    ) -> None:
        _refuse_slices(module)
        self.module, self.plan, self._device, self._workers = module, plan, device, rank.workers
        self.position = position_of(plan.mesh, rank.index)
        self._kind, self._clock = engine_of(plan), StepClock(device)
        self._steps = steps = Steps(module)
        first_names = {id(parameter): name for name, parameter in module.named_parameters()}
        self.names = {name: first_names[id(p)] for name, p in module.named_parameters(remove_duplicate=False)}
        """The first name of each parameter, by any of its names."""
        mesh = device_mesh(plan.mesh, device, timeout_s=plan.timeout_s) if rank.workers > 1 else None
        self._shards = open_shards(plan, self.position, rank=rank, store=store, device=device)
        if rank.workers > 1:
            begin_alike([*steps.parameters(), *steps.buffers()])
        with torch.random.fork_rng(devices=[]):
            self.layout = apply_plan(
                _job_of(steps, seed=seed, tensor_plan=tensor_plan),
                plan,
                position=self.position,
                mesh=mesh,
                device=device,
                call=lambda model, _: model,
                waiting=self._clock.waiting,
                shared=self._shards,
            )
        if self.is_cut:
            _CUT.add(module)
        module.to(device)  # all is there already; but the module learns where it is
        shapes = [parameter.shape for parameter in self.layout.parameters.values()]
        place = Place(rank=rank, store=store, device=device)
        if store is not None:
            place = located(place, timeout_s=plan.timeout_s)
        self._meeting = open_meeting(plan, place, shapes=shapes, seed=seed)
        self.communication = self._meeting.communication
        if self._meeting.feedback is not None and not plan.mesh.keeps_whole:
            for root in self.layout.roots:
                compress_shards(root, self._meeting.feedback)
        self._replicas: Replicas | None = None
        if self._kind == "ddp":
            self._replicas = self._meeting.replicas(steps, clock=self._clock)
        self._slices: Slices | None = None
        self._is_first = self._begins = True

    @property
    def is_cut(self) -> bool:
        """Whether a worker holds only slices of the parameters."""
        return not self.plan.mesh.keeps_whole

    def bring(self) -> None:
        """Have the module on its device, also after Lightning has brought it to the processor at the end of a run."""
        if not self.is_cut:
            self.module.to(self._device)

    def close(self) -> None:
        """Leave the meetings, and the module as it is."""
        self._replicas = None
        self.layout.dropout.remove()
        self._meeting.close()
        if self._shards is not None:
            self._shards.close()

    def sharded_of(self, local: nn.Parameter) -> nn.Parameter:
        """Return the module's parameter of which the optimizer has been given `local`."""
        pairs = self._slices.pairs if self._slices is not None else []
        return next((cast(nn.Parameter, sharded) for own, sharded in pairs if own is local), local)

    def own(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer`, made with the module's parameters, step on what this worker holds of them."""
        self._slices, self._begins = Slices(optimizer), True

    def precision(self) -> AbstractContextManager[object]:
        """Return what forward passes run in."""
        return precision_context(self.plan.precision, self._device, cache=self._kind != "fsdp")

    def run(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return what a step without gradients returns. Called by every worker, where workers hold slices."""
        # Not Lightning's inference mode: parameters that are gathered in it could not be trained with afterwards.
        with torch.inference_mode(False), torch.no_grad(), self.layout.contexts():
            return self._steps(name, *args, **kwargs)

    def train(
        self,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        step: int,
        samples: Sequence[int],
        counts: bool,
        last: bool,
    ) -> Any:
        """Return what the training step returns; `last`: of those whose gradients one optimizer step takes."""
        if self._kind == "fsdp":
            begin_micro_batch(cast(FSDPModule, self._steps), zero=self.plan.zero, is_last=last)
        self.layout.dropout.begin(step=step, samples=samples)
        with self.layout.contexts(), counting(counts):
            return (self._replicas or self._steps)("training_step", *args, **kwargs)

    @contextmanager
    def backward(self, *, counts: bool) -> Iterator[None]:
        """Be entered around backward."""
        if self._begins and self._slices is not None:
            self._slices.drop()
        self._begins = False
        with self.layout.contexts(), counting(counts), self._meeting.explained():
            yield

    def accumulating(self) -> AbstractContextManager[object]:
        """Return what all forward and backward passes but the last of an optimizer step run in."""
        return nullcontext() if self._replicas is None else self._replicas.accumulating()

    def finish(self) -> None:
        """Bring the gradients together, after the last backward before an optimizer step. Called by every worker."""
        if self._replicas is not None:
            self._replicas.finish()
        if self._workers > 1:
            self.layout.finish_gradients()
        if self._is_first:
            refuse_unused(self.layout, self._workers)
        if self._slices is not None:
            self._slices.bring()
        self._is_first, self._begins = False, True
        self._clock.take()

    def clip(self, norm: float) -> None:
        """Scale the gradients so that the norm of the whole is at most `norm`. Called by every worker."""
        parts = squares(self.layout.parameters, self.layout.parts)
        total = torch.zeros(1, dtype=torch.float64, device=self._device)
        if parts:
            total += torch.stack(list(parts.values())).sum()
        if self._workers > 1:
            all_reduce_sum(total).wait()
        clip(self.layout.parameters, total.sqrt().squeeze(), norm)


def _refuse_slices(module: nn.Module) -> None:
    if module in _CUT:
        raise ConfigError(
            "the module holds slices already, of another plan that an earlier Trainer of this process laid over it. "
            "Build the module anew; trainer.fit(ckpt_path=...) gives it the weights of a checkpoint."
        )


def _job_of(steps: Steps, *, seed: int, tensor_plan: dict[str, str] | None) -> Job:
    """Return a job of which only the model counts: Lightning has the rest."""
    plan = {f"module.{pattern}": style for pattern, style in tensor_plan.items()} if tensor_plan else None
    unused = {"loss": lambda *_: None, "optimizer": lambda *_: None, "data": [0], "batch_size": 1, "steps": 1}
    return Job(model=lambda: steps, seed=seed, tensor_plan=plan, **unused)  # type: ignore[arg-type]

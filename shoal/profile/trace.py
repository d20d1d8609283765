"""Trace a job on fake tensors: what one step costs, found without running it and without the memory it needs.

1. Build the model under FakeTensorMode: its tensors have shapes and no numbers.
2. Take the middle out of every run of layers that are built alike; if two that stay do not come out alike, trace all.
3. Run forward, loss and backward on a fake micro-batch and on one of twice the size: what does not grow is fixed.
4. Step the optimizer twice: the first step makes its state, the second costs what all do. Once more without one layer
   of each run that was cut: the difference is what each layer adds that was left out.

Work space inside a kernel is seen only where `kernels` knows it.
"""

import contextlib
import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shoal.core.errors import ShoalError
from shoal.profile import kernels
from shoal.profile.blame import untraceable
from shoal.profile.layers import cut_short, find_layers
from shoal.profile.live import storage_bytes, strided_tensors
from shoal.profile.recorder import Recorder, Visit
from shoal.profile.sample import process_untouched, sample_batch
from shoal.profile.summary import as_layer, is_regular, merged, owned_tensors
from shoal.profile.torch_private import FakeCopyMode, FakeTensor, FakeTensorMode, tree_map_only
from shoal.profile.transformers_private import on_fake_tensors
from shoal.profile.vocabulary import find_vocabularies
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.profile import Profile


def trace(job: Job, *, micro_batch: int, precision: str, gpu: bool = False) -> Profile:
    """Return what `job` costs at `micro_batch` samples a forward, with the kernels of a GPU or of the CPU.

    Raises PlanError where the job cannot be traced.
    """
    with process_untouched(), on_fake_tensors(), kernels.gpu_kernels() if gpu else contextlib.nullcontext():
        batches = [sample_batch(job, size) for size in (micro_batch, 2 * micro_batch)]
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            model = _build(job, fake)
            with fake:
                return _Tracer(job, model, precision=precision, gpu=gpu).profile(
                    [tree_map_only(torch.Tensor, fake.from_tensor, batch) for batch in batches], micro_batch
                )
        except ShoalError:
            raise
        except Exception as error:
            raise untraceable(error, job.model) from error


def build_fake(job: Job) -> nn.Module:
    """Return the job's model on fake tensors, for questions about its structure."""
    with process_untouched():
        try:
            return _build(job, FakeTensorMode(allow_non_fake_inputs=True))
        except Exception as error:
            raise untraceable(error, job.model) from error


def _build(job: Job, fake: FakeTensorMode) -> nn.Module:
    """Return the job's model on fake tensors, which takes no memory; or, where it cannot be built so, a fake copy."""
    try:
        with fake:
            model: nn.Module = job.model()
        if all(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
            return model
    except Exception:
        # Builders that ask for numbers (torch.linspace(...).tolist()), load a checkpoint, or end in .to(dtype).
        model = job.model()
    with fake, FakeCopyMode(fake):  # a copy also of a model that the builder keeps, so that the user's own stays whole
        return copy.deepcopy(model)


class _Tracer:
    """A model on fake tensors, and how it is to be traced."""

    def __init__(self, job: Job, model: nn.Module, *, precision: str, gpu: bool) -> None:
        self.job, self.model = job, model
        self.precision, self.gpu = precision, gpu
        self.layers, self.runs = find_layers(model)
        self.rounded = kernels.rounded if gpu else int

    def profile(self, batches: list[Any], micro_batch: int) -> Profile:
        """Return what the model costs with the first of `batches`; the second is twice the size."""
        weights, (small, large) = self._record_all(batches)
        owned = owned_tensors(self.model, small, self._dropped(weights))
        optimizer, step = self._optimizer_cost(weights)
        blocks = {id(member) for run in self.runs for member in run.members()}
        layers = [
            as_layer(
                visit,
                twice,
                tensors,
                optimizer=optimizer,
                weights=weights,
                blocks=blocks,
                vocabulary=self._vocabulary(),
                rounded=self.rounded,
            )
            for visit, twice, tensors in zip(small, large, owned, strict=True)
        ]
        return Profile(
            micro_batch=micro_batch,
            precision=self.precision,
            dtype=_main_dtype(self.model),
            layers=merged(layers),
            input_bytes=storage_bytes(strided_tensors(batches[0])),
            optimizer_work_bytes=step.work_bytes,
            optimizer_moved_bytes=step.moved_bytes,
            optimizer_operations=step.operations,
        )

    def _vocabulary(self) -> dict[int, int]:
        """Return the weights (by id) that tensor parallelism divides by tokens, with how many these are."""
        inside = {id(module) for run in self.runs for member in run.members() for module in member.modules()}
        modules = dict(self.model.named_modules())
        for found in find_vocabularies(self.model, is_free=lambda name: id(modules[name]) not in inside):
            return {id(modules[name].weight): found.rows for name in found.modules}
        return {}

    def _record_all(self, batches: list[Any]) -> tuple[dict[int, int], list[list[Visit]]]:
        """Return a step's visits for each of `batches`, and what those that stand for several stand for."""
        if self.runs:
            # A model that counts its layers fails when some are missing; one that treats them differently shows it.
            with contextlib.suppress(Exception), cut_short(self.runs) as weights:
                recorded = [self._record(batch) for batch in batches]
                if all(is_regular(visits, weights) for visits in recorded):
                    return weights, recorded
        return {}, [self._record(batch) for batch in batches]

    def _record(self, batch: Any) -> list[Visit]:
        recorder = self._recorder()
        self.model.zero_grad(set_to_none=True)
        recorder.live.watch([*self.model.parameters(), *self.model.buffers()])
        recorder.live.watch(batch)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        hooks = [self._name_gradients(parameter, recorder) for parameter in parameters]
        recorder.watch_layers(self.model, self.layers.items())
        try:
            with recorder:
                with torch.autocast("cpu", torch.bfloat16, enabled=self.precision == "bf16"):
                    # In one expression: the output dies here unless the graph needs it, and does not wait.
                    loss = self.job.loss(call_model(self.model, self.job, batch), batch)
                recorder.backward_begins()
                loss.backward()
        finally:
            recorder.stop_watching()
            for hook in hooks:
                hook.remove()
        return recorder.visits

    def _name_gradients(self, parameter: Any, recorder: Recorder) -> Any:
        return parameter.register_post_accumulate_grad_hook(lambda p: recorder.live.name_gradient(p.grad))

    def _recorder(self) -> Recorder:
        return Recorder(rounded=self.rounded, work_bytes=kernels.work_bytes if self.gpu else kernels.no_work_bytes)

    def _dropped(self, weights: dict[int, int]) -> list[nn.Module]:
        runs = [run.members() for run in self.runs]
        return [module for members in runs if id(members[1]) in weights for module in members[2:-2]]

    def _optimizer_cost(self, weights: dict[int, int]) -> tuple[Any, "_OptimizerCost"]:
        """Return the optimizer with the state of the layers that were traced, and what its step costs for all."""
        dropped = {id(p) for module in self._dropped(weights) for p in module.parameters()}
        optimizer, kept = self._optimizer_step(dropped)
        total = kept
        for run in self.runs:
            second = run.members()[1]
            if id(second) in weights:  # each one that was dropped costs what this one does
                _, without = self._optimizer_step(dropped | set(map(id, second.parameters())))
                total = total.plus(kept, without, times=weights[id(second)] - 1)
        return optimizer, total

    def _optimizer_step(self, dropped: set[int]) -> tuple[Any, "_OptimizerCost"]:
        """Step twice without the `dropped` parameters; return the optimizer and what the second step cost."""
        parameters = [p for p in self.model.parameters() if p.requires_grad and id(p) not in dropped]
        optimizer = self.job.optimizer(parameters)
        if self.gpu:
            kernels.as_on_gpu(optimizer)
        recorder = self._recorder()
        recorder.live.watch([tensor for p in parameters for tensor in (p, p.grad) if tensor is not None])
        # An optimizer that asks for a number (Adafactor its step count) does the same work whatever it is told.
        recorder.scalars_are_one = True
        with recorder:
            optimizer.step()
            record = recorder.count_operations()
            if self.job.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(parameters, self.job.clip_norm)
            optimizer.step()
        return optimizer, _OptimizerCost(record.peak_bytes, record.cost.moved_bytes, record.cost.operations)


@dataclass(frozen=True)
class _OptimizerCost:
    work_bytes: int
    moved_bytes: int
    operations: int

    def plus(self, kept: "_OptimizerCost", without: "_OptimizerCost", *, times: int) -> "_OptimizerCost":
        """Return this and `times` the difference of `kept` and `without`."""
        return _OptimizerCost(
            self.work_bytes + times * (kept.work_bytes - without.work_bytes),
            self.moved_bytes + times * (kept.moved_bytes - without.moved_bytes),
            self.operations + times * (kept.operations - without.operations),
        )


def _main_dtype(model: nn.Module) -> str:
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel()
    return str(counts.most_common(1)[0][0]).removeprefix("torch.") if counts else ""

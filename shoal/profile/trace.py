"""Trace a job on fake tensors: what one step costs, found without running it and without the memory it needs.

1. Build the model under FakeTensorMode: its tensors have shapes and no numbers.
2. Run forward, loss and backward on a fake micro-batch, and look at every operation: bytes alive, FLOPs, bytes moved.
3. Step the optimizer twice: the first step makes its state, the second is what every later step costs.

The transient bytes are those of a steady step in which the gradients exist throughout, as DDP's buckets do and as
they do while micro-batches accumulate. `planner.memory` says what is different where they come and go.
Work space inside a kernel is not seen.
"""

import contextlib
import copy
from typing import Any

import torch

from shoal.core.errors import ShoalError
from shoal.profile.blame import untraceable
from shoal.profile.cost import Cost
from shoal.profile.live import LiveBytes, storage_bytes, strided_tensors
from shoal.profile.sample import process_untouched, sample_batch
from shoal.profile.torch_private import FakeCopyMode, FakeTensor, FakeTensorMode, TorchDispatchMode, tree_map_only
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.profile import Profile


def trace(job: Job, *, micro_batch: int, precision: str) -> Profile:
    """Return what `job` costs at `micro_batch` samples a forward; raise PlanError where it cannot be traced."""
    with process_untouched():
        real_batch = sample_batch(job, micro_batch)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        try:
            model = _build(job, fake)
            with fake:
                batch = tree_map_only(torch.Tensor, fake.from_tensor, real_batch)
                return _trace_step(job, model, batch, micro_batch=micro_batch, precision=precision)
        except ShoalError:
            raise
        except Exception as error:
            raise untraceable(error, job.model) from error


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Shows every operation to a LiveBytes and a Cost."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveBytes()
        self.cost = Cost()
        self.scalars_are_one = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.scalars_are_one and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        out = func(*args, **(kwargs or {}))
        self.cost.add(func, args, kwargs or {}, out, self.live.watch(out))
        return out


def _build(job: Job, fake: FakeTensorMode) -> torch.nn.Module:
    """Return the job's model on fake tensors, which takes no memory; or, where it cannot be built so, a fake copy."""
    try:
        with fake:
            model: torch.nn.Module = job.model()
        if all(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
            return model
    except Exception:
        # Builders that ask for numbers (torch.linspace(...).tolist()), load a checkpoint, or end in .to(dtype).
        model = job.model()
    with fake, FakeCopyMode(fake):  # a copy also of a model that the builder keeps, so that the user's own stays whole
        return copy.deepcopy(model)


def _trace_step(job: Job, model: torch.nn.Module, batch: Any, *, micro_batch: int, precision: str) -> Profile:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model_bytes = storage_bytes([*model.parameters(), *model.buffers()])
    optimizer = job.optimizer(parameters)
    watch = _Watch()
    watch.live.watch([*model.parameters(), *model.buffers()])
    watch.live.watch(batch)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: watch.live.name_gradient(p.grad))  # type: ignore[no-untyped-call]
    _forward_backward(job, model, batch, watch=watch, precision=precision)
    compute, watch.cost = watch.cost, Cost()
    beyond_model_bytes = watch.live.peak_without_gradients_bytes - model_bytes
    gradient_bytes = storage_bytes(p.grad for p in parameters if p.grad is not None)
    work_bytes = _optimizer_step(job, optimizer, parameters, watch)
    return Profile(
        micro_batch=micro_batch,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        parameter_bytes=model_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=storage_bytes(strided_tensors(list(optimizer.state.values()))),
        transient_bytes=max(beyond_model_bytes, work_bytes),
        flops=compute.flops,
        moved_bytes=compute.moved_bytes,
        operations=compute.operations + watch.cost.operations,
        optimizer_moved_bytes=watch.cost.moved_bytes,
    )


def _forward_backward(job: Job, model: torch.nn.Module, batch: Any, *, watch: _Watch, precision: str) -> None:
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with watch:
        with autocast:
            # In one expression: the output dies here unless the graph needs it, and does not wait for the backward.
            loss = job.loss(call_model(model, job, batch), batch)
        loss.backward()


def _optimizer_step(job: Job, optimizer: Any, parameters: list[Any], watch: _Watch) -> int:
    """Step twice, leave the cost of the second step in `watch`, and return the work space it needs."""
    # An optimizer that asks for a number (Adafactor its step count) does the same work whatever it is told.
    watch.scalars_are_one = True
    with watch:
        optimizer.step()
        watch.cost = Cost()
        watch.live.restart_peaks()
        before_bytes = watch.live.live_bytes
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(parameters, job.clip_norm)
        optimizer.step()
    return watch.live.peak_bytes - before_bytes

"""A job's model and optimizer under DeepSpeed.

1. Every worker builds the whole model, in the host's memory: DeepSpeed's own way to build it in shards sees a layer
   only until it is built, and a model that sets weights afterwards would set empty ones.
2. The job's optimizer is built over the whole parameters, because its builder may look at their shapes.
3. With ZeRO-3, parameters go to the device in shards, one after the other; otherwise whole, with the model.
4. DeepSpeed lays the parameters in rows, and gives the optimizer this worker's part of them.
"""

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shoal.comm.collectives import Waiting
from shoal.comm.mesh import Position
from shoal.core.errors import JobError
from shoal.parallel.apply import whole_layout
from shoal.parallel.deepspeed.config import deepspeed_config
from shoal.parallel.deepspeed.load import load_deepspeed
from shoal.parallel.deepspeed.private import rows_of, set_up, tear_down
from shoal.parallel.layout import Layout
from shoal.parallel.optimizer import treats_by_itself
from shoal.parallel.precision import precision_context
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.plan import Plan


class Called(nn.Module):
    """The model and what is made of its output, in one call: whatever uses parameters lies inside."""

    def __init__(self, model: nn.Module, job: Job, *, precision: str, device: torch.device) -> None:
        super().__init__()
        self.model, self._job = model, job
        self._precision, self._device = precision, device

    def forward(self, batch: Any, finish: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """Return finish(output) of a batch."""
        with precision_context(self._precision, self._device, cache=False):
            return finish(call_model(self.model, self._job, batch))


@dataclass
class DeepSpeedLayout(Layout):
    """What one worker holds of a model under DeepSpeed."""

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Of all parameters, trained or not, as the job built them."""
    engine: Any = None
    """DeepSpeed's, once it is there."""
    set_back: Callable[[], None] = lambda: None
    """Undoes what it has made of the environment."""

    def whole(self, name: str) -> torch.Tensor:
        """Return the parameter `name` as it is in the job's model. Called by every worker."""
        from deepspeed.utils import safe_get_full_fp32_param

        found: torch.Tensor = safe_get_full_fp32_param(self.parameters[name])
        return found.detach().clone()

    def whole_gradient(self, name: str) -> torch.Tensor | None:
        """Return the gradient of the parameter `name` after the last backward of a step. Called by every worker."""
        from deepspeed.utils import safe_get_full_grad

        gradient: torch.Tensor | None = safe_get_full_grad(self.parameters[name])
        return gradient

    def engine_holds(self) -> list[torch.Tensor]:
        """Return what DeepSpeed keeps of the parameters, beside what the model shows of them."""
        shards = [p.ds_tensor for p in self.model.parameters() if hasattr(p, "ds_tensor")]
        return [*rows_of(self.engine), *shards]

    def close(self) -> None:
        """Let go of the engine, before the group of all workers ends."""
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
        self.set_back()
        tear_down()


def lay_out(
    job: Job, plan: Plan, *, position: Position, mesh: DeviceMesh | None, device: torch.device
) -> DeepSpeedLayout:
    """Return the job's model, whole in the host's memory, before DeepSpeed has it. Called by every worker."""
    load_deepspeed(device)
    layout = whole_layout(job, plan, position=position, mesh=mesh, device=torch.device("cpu"))
    parts = {each.name: getattr(layout, each.name) for each in dataclasses.fields(Layout)}
    shapes = {name: tuple(parameter.shape) for name, parameter in layout.model.named_parameters()}
    why = "DeepSpeed takes its shards from it" if plan.zero == 3 else ""
    return DeepSpeedLayout(**parts | {"meets": plan.workers > 1, "why_whole": why}, shapes=shapes)


def start_engine(
    layout: DeepSpeedLayout,
    job: Job,
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    *,
    local_index: int,
    device: torch.device,
    waiting: Waiting,
) -> Any:
    """Give the model and the optimizer to DeepSpeed, and return its engine. Called by every worker."""
    check_optimizer(optimizer)
    deepspeed = load_deepspeed(device)
    micro_batch = plan.at_once(job.largest_batch)
    config = deepspeed_config(plan, micro_batch=micro_batch, clip_norm=job.clip_norm, gpu=device.type == "cuda")
    set_up(device, waiting=waiting, timeout_s=plan.timeout_s)
    layout.set_back = _set_local_rank(device.index if device.type == "cuda" else local_index)
    if plan.zero == 3:
        deepspeed.zero.Init(module=layout.model, config_dict_or_path=config)
    for name, buffer in layout.model.named_buffers():
        _set_buffer(layout.model, name, buffer.to(device))
    called = Called(layout.model, job, precision=plan.precision, device=device)
    layout.engine, *_ = deepspeed.initialize(model=called, optimizer=optimizer, config=config)
    return layout.engine


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that would train something else on a row of numbers than on the parameters."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.Adagrad):
        reason = "which DeepSpeed replaces by one of its own, without the groups of the job's"
    elif not treats_by_itself(optimizer):
        reason = "which may look at whole parameters, and DeepSpeed gives it rows of numbers"
    else:
        return
    raise JobError(
        f"engine='deepspeed' with the optimizer {name}, {reason}. Use AdamW, SGD or the like, or engine='torch'."
    )


def _set_local_rank(number: int) -> Callable[[], None]:
    """Set the variable by which DeepSpeed finds its device, whenever it looks; return what sets it back."""
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = str(number)

    def set_back() -> None:
        if before is None:
            os.environ.pop("LOCAL_RANK", None)
        else:
            os.environ["LOCAL_RANK"] = before

    return set_back


def _set_buffer(model: nn.Module, name: str, buffer: torch.Tensor) -> None:
    prefix, _, last = name.rpartition(".")
    model.get_submodule(prefix)._buffers[last] = buffer

"""Batch norm over the whole global batch, wherever its samples are: on the CPU too, and with unequal parts.

1. Each worker takes, for every channel, how many values it has (n), their mean, and the sum of their squared distances
   from it (M2).
2. One all-gather tells everyone all of these. With N = sum n and mean = sum n_i mean_i / N, the whole batch has
   M2 = sum (M2_i + n_i (mean_i - mean)^2), without the loss of digits of sum x^2 - (sum x)^2 / N.
3. Each worker normalises its own values. The running averages move by the mean and by M2 / (N - 1), alike everywhere.
4. Backward: one all-reduce of the sums of g and of g * y over the channel, for gradients g and normalised values y;
   the gradient of a value is then weight / deviation * (g - sum g / N - y sum gy / N). The gradients of weight and bias
   are those of the worker's own values: whoever sums gradients over workers sums these too.

Example: one worker has 1, 2, 3 (n 3, mean 2, M2 2), the other 6 (n 1, mean 6, M2 0). N = 4, mean = (6 + 6) / 4 = 3,
M2 = 2 + 3 * 1 + 0 + 1 * 9 = 14, as from 1, 2, 3, 6 directly.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from shoal.comm.collectives import ProcessGroup, gather_parts, start_sum
from shoal.core.errors import JobError

_COUNTS = [True]  # of all threads: on a GPU, what is recomputed runs in one of torch's


def apply_batch_norm(model: nn.Module, group: ProcessGroup | None) -> list[str]:
    """Let every batch norm of `model` that trains take its statistics over all workers of `group`; return their names.

    In place: modules, parameters and buffers stay what they are. From then on each forward in training, and each
    backward, is called by every worker of the group. A worker alone (None) needs nothing, and nothing is done.
    """
    if group is None or group.size() == 1:
        return []
    changed = []
    for name, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) and module.training:
            _join(module, group)
            changed.append(name)
    return changed


@contextmanager
def counting(counts: bool) -> Iterator[None]:
    """Run forwards whose samples count (or not) in the statistics: with False, a worker only takes part."""
    _COUNTS.append(counts)
    try:
        yield
    finally:
        _COUNTS.pop()


class _Joined(nn.Module):
    """What is put in front of a batch norm's own class; its forward stays, whatever else it does."""

    _over_workers: "_OverWorkers"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training:
            return super().forward(*args, **kwargs)
        with self._over_workers:
            return super().forward(*args, **kwargs)


def _join(module: Any, group: ProcessGroup) -> None:
    module.__class__ = _joined_class(module.__class__)
    module._over_workers = _OverWorkers(group)


@functools.cache
def _joined_class(own: Any) -> Any:
    return type(own.__name__, (_Joined, own), {"__module__": own.__module__})


class _OverWorkers(TorchFunctionMode):
    """While entered, torch's batch norm is over all workers of a group."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self._group = group

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return what `func` returns."""
        if func is F.batch_norm:
            return _batch_norm(self._group, _Call(*args, **(kwargs or {})))
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: Any) -> "_OverWorkers":
        return self  # a copy of the model has the same workers


class _Call(NamedTuple):
    """The arguments of torch's batch norm, by their names."""

    input: Tensor
    running_mean: Tensor | None
    running_var: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    training: bool = False
    momentum: float = 0.1
    eps: float = 1e-5


def _batch_norm(group: ProcessGroup, call: _Call) -> Tensor:
    if not call.training:
        return F.batch_norm(*call)
    how = _How(call.eps, group, _COUNTS[-1])
    output, mean, m2, total = _BatchNorm.apply(call.input, call.weight, call.bias, how)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        if call.running_mean is not None:
            call.running_mean.lerp_(mean.to(call.running_mean.dtype), call.momentum)
        if call.running_var is not None:
            call.running_var.lerp_((m2 / (total - 1)).to(call.running_var.dtype), call.momentum)
    return output  # type: ignore[no-any-return]


class _How(NamedTuple):
    eps: float
    group: ProcessGroup
    counts: bool


class _BatchNorm(torch.autograd.Function):
    """Returns the normalised input; and mean, M2 and number of the values of a channel over all workers."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, how: _How
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Called by every worker of the group, as is backward."""
        mean, m2, total = _statistics(x, how.group, counts=how.counts)
        inverse = (m2 / total + how.eps).rsqrt()
        output = (x - _along(mean, x)) * _along(inverse if weight is None else inverse * weight, x)
        output = output if bias is None else output + _along(bias, x)
        ctx.save_for_backward(x, weight, mean, inverse, total)
        ctx.how, ctx.bias_dtype = how, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(mean, m2, total)
        return output.to(x.dtype), mean, m2, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Return the gradients of input, weight and bias."""
        x, weight, mean, inverse, total = ctx.saved_tensors
        gradient = gradient.to(mean.dtype)
        normalised = (x - _along(mean, x)) * _along(inverse, x)
        dims = _all_but_channels(x)
        sums = torch.stack([gradient.sum(dims), (gradient * normalised).sum(dims)])
        of_bias, of_weight = sums.clone()
        of_input = None
        if ctx.needs_input_grad[0]:
            start_sum(sums, ctx.how.group).wait()
            if ctx.how.counts:  # what does not count moves nobody's statistics
                sums /= total
                gradient = gradient - _along(sums[0], x) - normalised * _along(sums[1], x)
            of_input = (gradient * _along(inverse if weight is None else inverse * weight, x)).to(x.dtype)
        of_weight = None if weight is None else of_weight.to(weight.dtype)
        of_bias = None if ctx.bias_dtype is None else of_bias.to(ctx.bias_dtype)
        return of_input, of_weight, of_bias, None


def _statistics(x: Tensor, group: ProcessGroup, *, counts: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean and M2 of each channel of `x`, and the number of values, over all workers of `group`."""
    channels = x.shape[1]
    number = x.numel() // channels if counts else 0
    own = torch.zeros(2 * channels + 1, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    if number:
        variance, mean = torch.var_mean(x.to(own.dtype), _all_but_channels(x), correction=0)
        own[:channels], own[channels:-1], own[-1] = mean, variance * number, number
    gathered = gather_parts(own, group)
    means, m2s, numbers = torch.split(torch.stack(gathered), [channels, channels, 1], dim=1)
    total = numbers.sum()
    if number < 2 and float(total) < 2:  # asked only where it is not plain anyway, because it waits for a GPU
        raise JobError(
            f"a batch norm in training has {float(total):g} value per channel in the whole batch, and needs 2 or more "
            "to take a variance from. Use another batch size, so that the last batch has 2 samples or more."
        )
    mean = (numbers * means).sum(0) / total
    return mean, (m2s + numbers * (means - mean) ** 2).sum(0), total


def _all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _along(channels: Tensor, x: Tensor) -> Tensor:
    """Return one number a channel in a shape that goes with `x`."""
    return channels.view(1, -1, *[1] * (x.ndim - 2))

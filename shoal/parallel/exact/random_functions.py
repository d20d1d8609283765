"""The functions of torch that draw random numbers, computed with numbers given to them.

`OPENED` holds functions that draw only through others: they run as they stand, and what they call is met in its turn.
`DRAWING` holds those that draw themselves; each is called with where the numbers come from, itself and its arguments.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import FunctionType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from shoal.parallel.exact.draws import placed

_ALPHA = 1.7580993408473766  # minus the limit of SELU at minus infinity, as in torch's alpha dropout


class Numbers(Protocol):
    """Where the numbers come from. For a DTensor they are those of the elements that this worker has."""

    was_used: bool
    inexact: set[str]

    def keep(self, shape: Sequence[int], like: Tensor, p: float) -> Tensor:
        """Return a mask that is False with probability `p`."""

    def uniform(self, like: Tensor) -> Tensor:
        """Return numbers in [0, 1)."""

    def normal(self, like: Tensor) -> Tensor:
        """Return standard normal numbers."""


def _drop(*, of_features: bool = False, is_alpha: bool = False, in_place: bool = False) -> Callable[..., Tensor]:
    """Return what computes torch.dropout or one of its kin."""

    def dropped(numbers: Numbers, func: Any, input: Tensor, p: float, train: bool) -> Tensor:  # noqa: A002
        if not train or p <= 0 or p >= 1 or input.numel() == 0:
            return func(input, p, train)  # type: ignore[no-any-return]
        shape = (*input.shape[:2], *[1] * (input.ndim - 2)) if of_features else input.shape
        keep = numbers.keep(shape, input, p)
        keep = placed(keep, shape, input) if isinstance(input, DTensor) else keep
        scale = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5 if is_alpha else 1 / (1 - p)
        kept = input.mul_(keep).mul_(scale) if in_place else input * keep * scale
        if not is_alpha:
            return kept
        shift = (keep.to(input.dtype) - (1 - p)) * (_ALPHA * scale)
        return kept.add_(shift) if in_place else kept + shift

    return dropped


def _attend(numbers: Numbers, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Compute scaled_dot_product_attention; of DTensors, on the samples and heads that this worker has."""
    call = _Attention(*args, **kwargs)
    if call.dropout_p <= 0:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    shape = (*call.query.shape[:-1], call.key.shape[-2])
    whole = _divided_alike([call.query, call.key, call.value])
    if whole is None:
        return call.with_dropout(numbers.keep(shape, call.query, call.dropout_p))
    query = whole[0]
    call.query, call.key, call.value = (tensor.to_local() for tensor in whole)
    call.attn_mask = None if call.attn_mask is None else _mask_part(call.attn_mask, query)
    output = call.with_dropout(numbers.keep(shape, query, call.dropout_p))
    return placed(output, (*query.shape[:-1], output.shape[-1]), query)


@dataclass
class _Attention:
    """The arguments of scaled_dot_product_attention, by their names."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def with_dropout(self, keep: Tensor) -> Tensor:
        """Return the attention with the weights outside of `keep` dropped.

        The whole matrix of weights is in memory, because a fused kernel would draw its dropout on its own.
        """
        weights = self._weights()
        dropped = weights * keep * (1 / (1 - self.dropout_p) if self.dropout_p < 1 else 0)
        return dropped @ self._for_each_head(self.value)

    def _weights(self) -> Tensor:
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = (self.query * scale) @ self._for_each_head(self.key).transpose(-2, -1)
        if self.is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, float("-inf"))
        mask, wide = self.attn_mask, torch.promote_types(scores.dtype, torch.float32)
        if mask is None:
            return scores.softmax(-1, dtype=wide).to(self.value.dtype)
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        sees_nothing = scores.isneginf().all(-1, keepdim=True)  # such a row is zero in torch, not NaN
        weights = scores.masked_fill(sees_nothing, 0).softmax(-1, dtype=wide)
        return weights.masked_fill(sees_nothing, 0).to(self.value.dtype)

    def _for_each_head(self, tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(self.query.shape[-3] // tensor.shape[-3], -3) if self.enable_gqa else tensor


def _divided_alike(tensors: Sequence[Tensor]) -> list[DTensor] | None:
    """Return query, key and value divided in the same samples or heads, or in none; None if none is a DTensor."""
    first = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    if first is None:
        return None
    mesh = first.device_mesh
    nowhere = [Replicate()] * mesh.ndim
    whole = [t if isinstance(t, DTensor) else DTensor.from_local(t, mesh, nowhere, run_check=False) for t in tensors]
    placements: list[Shard | Replicate] = [
        next((p for p in found if type(p) is Shard and _divides(p.dim, mesh.size(axis), whole)), Replicate())
        for axis, found in enumerate(zip(*(tensor.placements for tensor in whole), strict=True))
    ]
    return [tensor.redistribute(placements=placements) for tensor in whole]


def _divides(dim: int, parts: int, tensors: Sequence[Tensor]) -> bool:
    return all(dim < tensor.ndim - 2 and tensor.shape[dim] % parts == 0 for tensor in tensors)


def _mask_part(mask: Tensor, query: DTensor) -> Tensor:
    """Return what belongs to this worker's samples and heads of a mask that is broadcast from the right."""
    mesh, missing = query.device_mesh, query.ndim - mask.ndim
    if not isinstance(mask, DTensor):
        mask = DTensor.from_local(mask, mesh, [Replicate()] * mesh.ndim, run_check=False)
    placements: list[Any] = []
    gradients: list[Any] = []
    for placement in query.placements:
        own = placement.dim - missing if isinstance(placement, Shard) else -1
        placements.append(Shard(own) if own >= 0 and mask.shape[own] > 1 else Replicate())
        is_shared = isinstance(placement, Shard) and isinstance(placements[-1], Replicate)
        gradients.append(Partial() if is_shared else placements[-1])  # each worker has a summand of a shared one
    part: Tensor = mask.redistribute(placements=placements).to_local(grad_placements=gradients)
    return part


def _fill(formula: Callable[..., Tensor], **defaults: Any) -> Callable[..., Tensor]:
    """Return a drawing function: torch makes the tensor or fills it, and what `formula` returns replaces its values."""

    def filled(numbers: Numbers, func: Any, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = func(*args, **kwargs)
        if kwargs.get("generator") is None and result.numel():
            named = {name: kwargs[name] for name in defaults if name in kwargs}
            given = defaults | dict(zip(defaults, args[1:], strict=False)) | named
            with torch.no_grad():
                _own(result).copy_(formula(numbers, result, *map(_own, given.values())))
        return result

    return filled


def _uniform(numbers: Numbers, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
    # What is nearest to 1 in float32 is 1 itself in bfloat16, and that is never drawn.
    largest = 1 - torch.finfo(x.dtype).eps / 2
    return low + (high - low) * numbers.uniform(x).clamp_(max=largest)


def _exponential(numbers: Numbers, x: Tensor, lambd: float) -> Tensor:
    # Never 0: its logarithm is taken. Numbers are 2**-24 apart.
    return (1 - numbers.uniform(x)).log_().neg_().clamp_(min=2.0**-25) / lambd


def _bernoulli(numbers: Numbers, func: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # noqa: A002
    """Compute torch.bernoulli, whose probabilities are `input` unless a number is given."""
    formula = _fill(lambda numbers, x, p: numbers.uniform(x) < p, p=input if not args and "p" not in kwargs else 0.0)
    return formula(numbers, func, input, *args, **kwargs)


def _leave(numbers: Numbers, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Let torch draw, and say so."""
    if kwargs.get("generator") is None:
        numbers.was_used = True
        numbers.inexact.add(func.__name__)
    return func(*args, **kwargs)


def _recur(numbers: Numbers, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Let torch run a recurrent network, whose dropout between layers is inside of its kernel."""
    drops = any(type(p) is float and p > 0 and train for p, train in pairwise(args))
    return _leave(numbers, func, *args, **kwargs) if drops else func(*args, **kwargs)


def _leave_graph(numbers: Numbers, func: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
    """Run torch.utils.checkpoint outside of the graph: in one, it would hide from the mode all that it runs.

    Only torch.compile hands it to a mode at all. What it runs is compiled by itself.
    """
    torch._dynamo.graph_break()
    return func(*args, **kwargs)


def _own(value: Any) -> Any:
    """Return this worker's part of a DTensor, and anything else as it is; without its history."""
    if isinstance(value, DTensor):
        value = value.to_local()
    return value.detach() if isinstance(value, Tensor) else value


def _opened(function: Any) -> Callable[..., Any]:
    """Return `function` without its first act, which is to hand itself to the modes as one piece."""
    blind = dict.fromkeys(("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic"), _no)
    twin = FunctionType(
        function.__code__,
        {**function.__globals__, **blind},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    twin.__kwdefaults__ = function.__kwdefaults__
    return twin


def _no(*_: Any) -> bool:
    return False


OPENED: Mapping[Any, Callable[..., Any]] = {
    function: _opened(function)
    for function in (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        F.rrelu,
        F.gumbel_softmax,
        F.multi_head_attention_forward,
        Tensor.backward,  # this and the next two run what torch.utils.checkpoint recomputes
        torch.autograd.backward,
        torch.autograd.grad,
    )
}

DRAWING: Mapping[Any, Callable[..., Any]] = {
    checkpoint: _leave_graph,
    torch.dropout: _drop(),
    torch.dropout_: _drop(in_place=True),
    torch.feature_dropout: _drop(of_features=True),
    torch.feature_dropout_: _drop(of_features=True, in_place=True),
    torch.alpha_dropout: _drop(is_alpha=True),
    torch.alpha_dropout_: _drop(is_alpha=True, in_place=True),
    torch.feature_alpha_dropout: _drop(of_features=True, is_alpha=True),
    torch.feature_alpha_dropout_: _drop(of_features=True, is_alpha=True, in_place=True),
    F.scaled_dot_product_attention: _attend,
    **dict.fromkeys((torch.rand, torch.rand_like), _fill(_uniform)),
    **dict.fromkeys((torch.randn, torch.randn_like), _fill(lambda numbers, x: numbers.normal(x))),
    **dict.fromkeys((torch.bernoulli, Tensor.bernoulli), _bernoulli),
    Tensor.bernoulli_: _fill(lambda numbers, x, p: numbers.uniform(x) < p, p=0.5),
    Tensor.uniform_: _fill(_uniform, **{"from": 0.0, "to": 1.0}),
    Tensor.normal_: _fill(lambda numbers, x, mean, std: mean + std * numbers.normal(x), mean=0.0, std=1.0),
    Tensor.exponential_: _fill(_exponential, lambd=1.0),
    **dict.fromkeys((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu), _recur),
    **dict.fromkeys(
        (
            torch.native_dropout,
            torch.normal,
            torch.poisson,
            torch.multinomial,
            Tensor.multinomial,
            torch.randperm,
            torch.randint,
            torch.randint_like,
            torch.rrelu,
            torch.rrelu_,
            Tensor.random_,
            Tensor.cauchy_,
            Tensor.geometric_,
            Tensor.log_normal_,
        ),
        _leave,
    ),
}

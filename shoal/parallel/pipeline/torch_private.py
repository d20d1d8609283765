"""The private parts of torch that a pipeline stands on.

When they move, tests/parallel/pipeline/test_pipeline.py says which.
"""

import copy
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from shoal.comm.collectives import start_sum
from shoal.profile.torch_private import FakeTensorMode, TorchDispatchMode

__all__ = [
    "Marks",
    "MicroBatchStage",
    "OnAction",
    "Shape",
    "fake_copy",
    "signature",
    "stood_in",
    "sum_over",
    "tensors_in",
    "tree_flatten",
    "tree_unflatten",
]

OnAction = Callable[[str, int, int, Any, Any], None]
"""Told (kind, micro-batch, piece, start, end) of every piece of work; kind is forward, backward or weights."""

_SHAPE_ONLY = {"empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like"}
_SHAPE_ONLY |= {"new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full"}
"""Operations that take a tensor for its shape: what they make does not depend on its numbers."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a tensor is like, but for its numbers."""

    sizes: tuple[int, ...]
    dtype: torch.dtype

    def tensor(self, device: torch.device, make: Callable[..., Tensor] = torch.empty) -> Tensor:
        """Return a tensor of this shape on `device`."""
        return make(self.sizes, dtype=self.dtype, device=device)


class Marks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, every operation passes the marks of what it reads on to what it makes or writes.

    Marks belong to storages, so a view has those of what it views. Gradients are no part of it: what is detached,
    rounded or compared is still seen to depend on what it was made of. What is made of marked tensors has the
    `ambient` marks as well. For fake tensors: all that is seen is kept.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._marks: dict[int, frozenset[Any]] = {}
        self._kept: list[Tensor] = []  # so that no storage's address is used again
        self._names: dict[int, str] = {}
        self.ambient: frozenset[Any] = frozenset()
        self.on_read: Callable[[str], None] = lambda _: None

    def name(self, tensor: Tensor, name: str) -> None:
        """Call `on_read(name)` from now on when `tensor` is read."""
        self._kept.append(tensor)
        self._names[tensor.untyped_storage()._cdata] = name

    def add(self, tensor: Tensor, *marks: Any) -> None:
        """Add `marks` to those of `tensor`."""
        self._kept.append(tensor)
        key = tensor.untyped_storage()._cdata
        self._marks[key] = self._marks.get(key, frozenset()) | frozenset(marks)

    def of(self, tensor: Tensor) -> frozenset[Any]:
        """Return the marks of `tensor`."""
        return self._marks.get(tensor.untyped_storage()._cdata, frozenset())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` and mark what it made."""
        del types
        result = func(*args, **(kwargs or {}))
        inputs = tensors_in((args, kwargs))
        for key in {tensor.untyped_storage()._cdata for tensor in inputs} & self._names.keys():
            self.on_read(self._names[key])
        read = frozenset[Any]().union(*map(self.of, inputs))
        if read and func.overloadpacket.__name__ not in _SHAPE_ONLY:
            for tensor in [*tensors_in(result), *_written(func, args, kwargs or {})]:
                self.add(tensor, *read, *self.ambient)
        return result


def fake_copy(model: nn.Module, fake: FakeTensorMode, device: torch.device) -> nn.Module:
    """Return a copy of `model` without numbers, as if on `device`; all its parameters that can have gradients do."""
    memo: dict[int, Any] = {}
    with fake:
        for module in model.modules():
            plain = [value for value in vars(module).values() if isinstance(value, Tensor)]
            for tensor in [*module._parameters.values(), *module._buffers.values(), *plain]:
                if tensor is not None and id(tensor) not in memo:
                    empty = torch.empty_like(tensor, device=device, requires_grad=False)
                    if isinstance(tensor, nn.Parameter):
                        empty = nn.Parameter(empty, requires_grad=tensor.is_floating_point() or tensor.is_complex())
                    memo[id(tensor)] = empty
    return copy.deepcopy(model, memo)


def signature(value: Any) -> Any:
    """Return what a call's course can depend on without looking at numbers: structure, shapes, types, plain values."""
    leaves, structure = tree_flatten(value)
    seen = [
        (tuple(leaf.shape), leaf.dtype)
        if isinstance(leaf, Tensor)
        else leaf
        if isinstance(leaf, (int, float, str, bool, type(None)))
        else type(leaf)
        for leaf in leaves
    ]
    return str(structure), tuple(seen)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers and in dataclasses that torch does not know as containers."""
    found = []
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
    return found


def _written(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors among the arguments that `func` writes to."""
    schema = func._schema.arguments
    given = [*zip(schema, args, strict=False), *((a, kwargs[a.name]) for a in schema if a.name in kwargs)]
    return tensors_in([value for argument, value in given if argument.alias_info and argument.alias_info.is_write])


class StandIn(nn.Module):
    """Takes a layer's place in the model, so that its calls can be seen, answered or ended."""

    def __init__(self, name: str, layer: nn.Module, visit: Callable[..., Any]) -> None:
        super().__init__()
        self.__dict__["_place"] = (name, layer, visit)  # not a child: the layer keeps its own place in the world

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Ask what to do."""
        name, layer, visit = self._place
        return visit(name, layer, args, kwargs)

    def __getattr__(self, attribute: str) -> Any:
        return getattr(self.__dict__["_place"][1], attribute)  # block.attention_type, wte.weight


@contextmanager
def stood_in(model: nn.Module, layers: dict[str, nn.Module], visit: Callable[..., Any]) -> Iterator[None]:
    """Within the block, a call of a layer of `model` is a call of `visit(name, layer, args, kwargs)`."""
    parents = [(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], name) for name in layers]
    try:
        for parent, key, name in parents:
            parent._modules[key] = StandIn(name, layers[name], visit)
        yield
    finally:
        for parent, key, name in parents:
            parent._modules[key] = layers[name]


class MicroBatchStage(PipelineStage):
    """torch's stage, for micro-batches that the module looks up itself, each with shapes of its own.

    torch takes one shape for all micro-batches, and asks for it by running the module. Here the shapes are known, and
    each micro-batch has its own buffers. `run(module, received, number)` is the forward of micro-batch `number`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        piece: int,
        pieces: int,
        device: torch.device,
        group: Any,
        received: Sequence[Sequence[Tensor]],
        sent: Sequence[Sequence[Tensor]],
        run: Callable[..., Any],
        on_action: OnAction | None,
        now: Callable[[], Any],
    ) -> None:
        super().__init__(
            module, piece, pieces, device, input_args=tuple(received[0]), output_args=tuple(sent[0]), group=group
        )
        self._received, self._sent = received, sent
        self._run, self._on_action, self._now = run, on_action, now
        self._number = 0
        self._runtime_validate = False  # it would hold every micro-batch against the first one's shapes

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of one micro-batch."""
        self._number = fwd_chunk_id
        with self._timed("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module on what was received and on the micro-batch."""
        del kwargs
        return self._run(super().forward_maybe_with_nosync, args, self._number)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the backward of one micro-batch, or the part of it that the stage before waits for."""
        if self.has_backward:
            with self._timed("backward", bwd_chunk_id):
                super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        """Run the part of a micro-batch's backward that was put off."""
        if self.has_backward:
            with self._timed("weights", bwd_chunk_id):
                super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Reduce what was accumulated; an evaluation has nothing to reduce."""
        if self.has_backward:
            super().perform_reduce_grad(grad_scale_factor)

    def _prepare_forward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_forward_infra(num_microbatches, *args, **kwargs)
        if not self.is_first:
            self._give_buffers(self.args_recv_info, self._received, requires_grad=self.has_backward)
        return result

    def _prepare_backward_infra(self, num_microbatches: int, *args: Any, **kwargs: Any) -> Any:
        result = super()._prepare_backward_infra(num_microbatches, *args, **kwargs)
        if not self.is_last:
            self._give_buffers(self.grad_recv_info, self._sent, requires_grad=False)
        return result

    def _give_buffers(self, infos: Any, shapes: Sequence[Sequence[Tensor]], *, requires_grad: bool) -> None:
        for number, metas in enumerate(shapes):
            for info, meta in zip(infos[number], metas, strict=True):
                info.buffer = torch.empty_like(meta, device=self.device).requires_grad_(requires_grad)

    def _validate_fwd_input(self, *args: Any) -> None:
        """Nothing: torch 2.11 holds every micro-batch against the first one's shapes."""

    def _validate_fwd_outputs(self, *args: Any) -> None:
        """Nothing, for the same reason."""

    @contextmanager
    def _timed(self, kind: str, number: int) -> Iterator[None]:
        start = self._now()
        yield
        if self._on_action is not None:
            self._on_action(kind, number, self.stage_index, start, self._now())


def sum_over(group: Any, parameter: Tensor) -> Any:
    """Start adding up the gradient of `parameter`, or of this worker's shard of it, over `group`; return the work."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    gradient = parameter.grad
    return start_sum(gradient.to_local() if isinstance(gradient, DTensor) else gradient, group)

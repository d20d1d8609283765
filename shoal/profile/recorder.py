"""Records a step on fake tensors, layer by layer: which operations ran in it, and what was alive at its worst moment.

1. A visit begins when a layer's module is called, and ends when the next layer's is: what runs in between (a residual
   sum, a reshape) belongs to the layer before. The loss is a visit of its own.
2. The backward enters a visit when the gradients of the next visit's inputs arrive.
3. Bytes of a forward count from what was alive when the visit began. When the backward begins, some of that is gone
   (what autocast had cached): bytes of a backward count from what is left of it, gradients of parameters apart.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.profile.cost import Cost, is_product
from shoal.profile.live import LiveBytes, strided_tensors
from shoal.profile.pairs import Pair, find_pairs
from shoal.profile.torch_private import TorchDispatchMode
from shoal.spec.profile import Pass


@dataclass
class PassRecord:
    """What a pass over a layer does, as it is found out."""

    cost: Cost = field(default_factory=Cost)
    peak_bytes: int = 0
    peak_own_bytes: int = 0
    peak_operation: str = ""

    def as_pass(self) -> Pass:
        """Return the record as the profile keeps it."""
        return Pass(
            flops=self.cost.flops,
            moved_bytes=self.cost.moved_bytes,
            operations=self.cost.operations,
            products=self.cost.products(),
            peak_bytes=self.peak_bytes,
            peak_own_bytes=self.peak_own_bytes,
            peak_operation=self.peak_operation,
        )


@dataclass
class Visit:
    """One call of one layer."""

    name: str
    modules: list[nn.Module] = field(default_factory=list)
    base_bytes: int = 0
    """What was alive when it began; from the backward on, what is left of that."""
    forward: PassRecord = field(default_factory=PassRecord)
    backward: PassRecord = field(default_factory=PassRecord)
    grown_bytes: int = 0
    """How much more was alive at its end than when it began."""
    saved_bytes: int = 0
    """What it made that is still alive when the backward begins."""
    saved_products_bytes: int = 0
    split_saved_bytes: int = 0
    output_bytes: int = 0
    heads: int = 0
    pairs: list[Pair] = field(default_factory=list)
    gradients_before_bytes: int | None = None
    """Gradients that were there when its backward began."""


@dataclass(frozen=True)
class _Made:
    """Who made a storage."""

    visit: Visit
    by_product: bool
    split: bool


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches every operation while it is active, and the layers that it is told to watch."""

    def __init__(self, *, rounded: Callable[[int], int], work_bytes: Callable[[Any, Any, Any], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = LiveBytes(rounded)
        self.visits: list[Visit] = []
        self.scalars_are_one = False
        self._work_bytes = work_bytes
        self._visit = Visit(name="")
        self._pass = self._visit.forward
        self._in_backward = False
        self._split = False
        self._pairs: dict[int, list[Pair]] = {}
        self._hooks: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.scalars_are_one and func is torch.ops.aten._local_scalar_dense.default:
            return 1.0
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        by_product = is_product(func)
        new_bytes = self.live.watch(out, _Made(self._visit, by_product, self._split))
        work_bytes = self._work_bytes(func, args, kwargs) if by_product else 0
        self._pass.cost.add(func, args, kwargs, out, new_bytes)
        if new_bytes or work_bytes:
            self._raise_peak(func, work_bytes)
        if by_product and "scaled_dot_product" in func._opname:
            self._note_heads(args)
        return out

    def count_operations(self) -> PassRecord:
        """Return a fresh record that counts from now on: for what is no pass over a layer."""
        self._visit, self._in_backward = Visit(name="", base_bytes=self.live.live_bytes), False
        self._pass = self._visit.forward
        return self._pass

    def watch_layers(self, model: nn.Module, layers: Iterable[tuple[str, nn.Module]]) -> None:
        """Begin a visit now, at every call of one of `layers`, and that of the loss when `model` returns."""
        self._visit = Visit(name=type(model).__name__, base_bytes=self.live.live_bytes)
        self._pass = self._visit.forward
        self.visits = [self._visit]
        for name, layer in layers:
            self._on_call(layer, functools.partial(self._begin, name))
            self._pairs[id(layer)] = find_pairs(layer)
            for pair in self._pairs[id(layer)]:
                self._watch_pair(pair)
        self._hooks.append(model.register_forward_hook(lambda _, __, out: self._begin_loss(out)))

    def backward_begins(self) -> None:
        """Count what follows as the backward, which begins with the loss."""
        self._in_backward = True
        for made, num_bytes in self.live.tagged():
            if made is not None:
                made.visit.saved_bytes += num_bytes
                made.visit.saved_products_bytes += made.by_product * num_bytes
                made.visit.split_saved_bytes += made.split * num_bytes
        self._visit.grown_bytes = self._visit.saved_bytes  # nothing of the forward comes after it
        base_bytes = self.visits[0].base_bytes
        for visit in self.visits:
            visit.base_bytes = base_bytes
            base_bytes += visit.saved_bytes
        self._enter_backward(self.visits[-1])

    def stop_watching(self) -> None:
        """Take all hooks off the model."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _raise_peak(self, func: Any, work_bytes: int) -> None:
        record, live = self._pass, self.live
        beyond_bytes = live.live_bytes + work_bytes - self._visit.base_bytes
        without_bytes = beyond_bytes - live.gradient_bytes
        if without_bytes > record.peak_bytes:
            record.peak_bytes = without_bytes
            record.peak_operation = func.overloadpacket.__name__
        record.peak_own_bytes = max(record.peak_own_bytes, beyond_bytes - (self._visit.gradients_before_bytes or 0))

    def _note_heads(self, args: Any) -> None:
        key = next(tensor for tensor in args[1:] if isinstance(tensor, torch.Tensor))
        self._visit.heads = key.shape[1]

    def _on_call(self, module: nn.Module, do: Callable[[nn.Module, Any], None]) -> None:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._in_backward:  # else it is being computed again
                do(module, (args, kwargs))

        self._hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _watch_pair(self, pair: Pair) -> None:
        def set_split(value: bool) -> None:
            self._split = value

        self._on_call(pair.start, lambda *_: set_split(True))
        self._on_call(pair.joins, lambda *_: set_split(False))
        if any(module is pair.joins for module in pair.start.modules()):  # joined without being called
            self._hooks.append(pair.start.register_forward_hook(lambda *_: set_split(False)))

    def _begin(self, name: str, module: nn.Module, inputs: Any) -> None:
        boundary = [tensor for tensor in strided_tensors(list(inputs)) if tensor.requires_grad]
        if not self._visit.modules:  # what ran before the first layer belongs to it
            self._visit.name, self._visit.pairs = name, self._pairs[id(module)]
        elif boundary:
            self._next_visit(Visit(name=name, pairs=self._pairs[id(module)]), boundary)
        # Where no gradient arrives, it cannot be told from the layer before, and belongs to it.
        self._visit.modules.append(module)

    def _begin_loss(self, out: Any) -> None:
        self._next_visit(Visit(name="loss"), [tensor for tensor in strided_tensors(out) if tensor.requires_grad])

    def _next_visit(self, visit: Visit, boundary: list[torch.Tensor]) -> None:
        before = self._visit
        before.output_bytes = sum(tensor.numel() * tensor.element_size() for tensor in boundary)
        before.grown_bytes = self.live.live_bytes - before.base_bytes
        for tensor in boundary:
            tensor.register_hook(lambda _: self._enter_backward(before))  # type: ignore[no-untyped-call]
        visit.base_bytes = self.live.live_bytes
        self.visits.append(visit)
        self._visit, self._pass, self._split = visit, visit.forward, False

    def _enter_backward(self, visit: Visit) -> None:
        if visit.gradients_before_bytes is None:
            visit.gradients_before_bytes = self.live.gradient_bytes
        self._visit, self._pass = visit, visit.backward

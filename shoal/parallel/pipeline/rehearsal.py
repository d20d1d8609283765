"""What a call of a model does, seen on fake tensors: which layers run, what crosses each boundary. See `split`."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import PlanError, ShoalError, did_you_mean
from shoal.parallel.pipeline.torch_private import (
    Marks,
    Shape,
    fake_copy,
    signature,
    stood_in,
    tensors_in,
    tree_flatten,
    tree_unflatten,
)
from shoal.profile.blame import untraceable
from shoal.profile.layers import find_layers
from shoal.profile.sample import process_untouched
from shoal.profile.torch_private import FakeTensorMode, tree_map_only
from shoal.profile.transformers_private import on_fake_tensors

Call = Callable[[Any, Any], Any]
"""How a job calls its model: call(model, batch) returns the model's output."""


@dataclass(frozen=True)
class Given:
    """An argument that a layer returns as it came, by its position."""

    position: int


@dataclass(frozen=True)
class Visit:
    """A call of a layer: in which piece, and what it returned."""

    layer: str
    piece: int
    outputs: tuple[Any, ...]
    """For each tensor its Shape, or Given; anything else as it is."""
    structure: Any
    is_remade: bool
    """Whether neither the layer nor what it was given has to do with parameters: every piece calls it for itself."""


@dataclass(frozen=True)
class Outline:
    """What a call of the model does, seen on fake tensors."""

    visits: tuple[Visit, ...]
    crossings: tuple[tuple[Shape, ...], ...]
    """For each boundary the tensors that cross it."""
    positions: tuple[dict[int, int], ...]
    """For each boundary: which argument of the block is which crossing tensor."""
    touched: tuple[frozenset[str], ...]
    """For each piece the parameters and buffers that are read outside of layers."""
    reached: tuple[frozenset[str], ...]
    """For each piece the parameters that what it hands on depends on."""


def find_blocks(model: nn.Module) -> list[str]:
    """Return the layers at which the model can be cut: those in a Sequential or ModuleList, in order."""
    blocks = []
    for name, layer in find_layers(model)[0].items():
        parent = model.get_submodule(name.rpartition(".")[0])
        if isinstance(parent, (nn.Sequential, nn.ModuleList)) and any(True for _ in layer.parameters()):
            blocks.append(name)
    return blocks


class Rehearsal:
    """A fake copy of a model, and what calling it does for batches of any shape."""

    def __init__(self, call: Call, model: nn.Module, boundaries: Sequence[str], *, device: torch.device) -> None:
        self.call, self.boundaries, self.device = call, tuple(boundaries), device
        self.layers = find_layers(model)[0]
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._model = fake_copy(model, self._fake, device)
        self._known: dict[Any, Outline] = {}
        for name in boundaries:
            if name not in self.layers:
                raise PlanError(f"the model has no block {name!r} to cut at.{did_you_mean(name, find_blocks(model))}")

    def outline(self, batch: Any, *, training: bool | None = None) -> Outline:
        """Return what a call with `batch` does. Only its shapes matter; those met before are remembered."""
        if training is not None and self._model.training != training:
            self._model.train(training)
        key = (self._model.training, signature(batch))
        if key not in self._known:
            self._known[key] = self._trace(batch)
        return self._known[key]

    def _trace(self, batch: Any) -> Outline:
        try:
            with process_untouched(), on_fake_tensors(), self._fake:
                batch = tree_map_only(Tensor, lambda t: torch.empty_like(t, device=self.device), batch)
                return _Tracing(self._model, self.boundaries).trace(self.call, batch)
        except ShoalError:
            raise
        except Exception as error:
            raise untraceable(error, type(self._model)) from error


class _Tracing:
    """One call of a fake model, looked at."""

    def __init__(self, model: nn.Module, boundaries: tuple[str, ...]) -> None:
        self.model, self.boundaries = model, boundaries
        self.layers = find_layers(model)[0]
        self.piece = 0
        self.visits: list[Visit] = []
        self.crossings: list[tuple[Shape, ...]] = []
        self.positions: list[dict[int, int]] = []
        self.touched: list[set[str]] = [set()]
        self.reached: list[frozenset[str]] = []
        self.marks = Marks()
        for name, tensor in [*model.named_buffers(), *model.named_parameters()]:
            self.marks.name(tensor, name)
        for name, parameter in model.named_parameters():
            self.marks.add(parameter, name)
        self.marks.on_read = lambda name: None if self.marks.ambient else self.touched[-1].add(name)

    def trace(self, call: Call, batch: Any) -> Outline:
        """Call the model and return what was seen."""
        with self.marks, stood_in(self.model, self.layers, self._visit):
            output = call(self.model, batch)
        if self.piece < len(self.boundaries):
            raise PlanError(
                f"the model cannot be cut at {self.boundaries[self.piece]!r}: it does not run, or not in this order. "
                f"These run, in order: {', '.join(dict.fromkeys(visit.layer for visit in self.visits))}."
            )
        self._end_piece(tensors_in(output))
        return Outline(
            tuple(self.visits),
            tuple(self.crossings),
            tuple(self.positions),
            tuple(map(frozenset, self.touched)),
            tuple(self.reached),
        )

    def _visit(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        if name in self.boundaries:
            args, kwargs = self._cross(name, args, kwargs)
        self.marks.ambient = frozenset({(name, self.piece)})
        output = layer(*args, **kwargs)
        self.marks.ambient = frozenset()
        given = tree_flatten((args, kwargs))[0]
        leaves, structure = tree_flatten(output)
        has_parameters = any(True for _ in layer.parameters())
        is_remade = not has_parameters and not any(map(self.marks.of, tensors_in(output)))
        specs = tuple(_spec(leaf, given) for leaf in leaves)
        if not is_remade:
            for leaf, spec in zip(leaves, specs, strict=True):
                if isinstance(spec, Shape):
                    self.marks.add(leaf, (name, self.piece))
        self.visits.append(Visit(name, self.piece, specs, structure, is_remade))
        return output

    def _cross(self, name: str, args: Any, kwargs: Any) -> Any:
        """End the piece at the entry of block `name`; return its arguments with those that cross made afresh."""
        if self.boundaries.index(name) != self.piece:
            raise PlanError(
                f"the model cannot be cut at {name!r}: it runs more than once, or out of the order "
                f"{', '.join(self.boundaries)}. Cut at blocks that run once, in the order in which they run."
            )
        leaves, structure = tree_flatten((args, kwargs))
        crossing = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor) and self._crosses(leaf)}
        self._end_piece(list(crossing.values()))
        if not crossing:
            raise PlanError(
                f"the model cannot be cut at {name!r}: no parameter is used before it. Cut at a later block."
            )
        for tensor in crossing.values():
            if not tensor.requires_grad:
                raise PlanError(
                    f"the model cannot be cut at {name!r}: it is given a tensor of {tensor.dtype} that layers before "
                    "it make without gradient, which a pipeline does not carry. Cut at another block."
                )
        self.piece += 1
        self.touched.append(set())
        slots = {key: slot for slot, key in enumerate(crossing)}
        self.positions.append({index: slots[id(leaf)] for index, leaf in enumerate(leaves) if id(leaf) in slots})
        self.crossings.append(tuple(_shape(tensor) for tensor in crossing.values()))
        fresh = [torch.empty_like(t, memory_format=torch.contiguous_format).requires_grad_() for t in crossing.values()]
        for tensor in fresh:
            self.marks.add(tensor, ("received", self.piece))
        positions = self.positions[-1]
        mended = [fresh[positions[index]] if index in positions else leaf for index, leaf in enumerate(leaves)]
        return tree_unflatten(mended, structure)

    def _end_piece(self, handed_on: list[Tensor]) -> None:
        marks = frozenset[Any]().union(*map(self.marks.of, handed_on))
        around = [m for m in marks if isinstance(m, tuple) and m[1] < self.piece]
        if around:
            layer = next(visit.layer for visit in self.visits if (visit.layer, visit.piece) in around)
            raise PlanError(_goes_around(self.model, layer, self.boundaries[self.piece - 1]))
        self.reached.append(frozenset(m for m in marks if isinstance(m, str)))

    def _crosses(self, tensor: Tensor) -> bool:
        """Whether it is made by layers. What is made of parameters alone, each piece makes for itself."""
        return any(isinstance(mark, tuple) for mark in self.marks.of(tensor))


def _spec(leaf: Any, given: list[Any]) -> Any:
    returned = [index for index, argument in enumerate(given) if argument is leaf and leaf is not None]
    if returned:
        return Given(returned[0])
    return _shape(leaf) if isinstance(leaf, Tensor) else leaf


def _shape(tensor: Tensor) -> Shape:
    return Shape(tuple(tensor.shape), tensor.dtype)


def _goes_around(model: nn.Module, layer: str, boundary: str) -> str:
    holder = layer.rpartition(".")[0]
    while isinstance(model.get_submodule(holder), (nn.Sequential, nn.ModuleList, nn.ModuleDict)) and holder:
        holder = holder.rpartition(".")[0]  # a list has no forward of its own
    owner = type(model.get_submodule(holder))
    where = f"{inspect.getsourcefile(owner)}:{inspect.getsourcelines(owner)[1]}"
    return (
        f"the model cannot be cut at {boundary!r}: {owner.__name__} ({where}) uses what {layer!r} returns again behind "
        "this block, which only hands on its own output. Cut in front of it or behind its last use with "
        "Job(stages=...), or let the blocks hand it on, as the members of an nn.Sequential do."
    )

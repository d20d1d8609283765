"""Finding where a model can be cut into pieces, and what each piece needs: on fake tensors, without any weights.

A piece begins where a block is entered. Each piece runs the model's own forward: layers that ran in an earlier piece
are stood in for, at the entry of its first block it takes what the piece before has sent, and it leaves the forward
where the next piece begins.

1. Call the model on fake tensors, each layer through a StandIn that sees it called.
2. Mark the parameters, and what a layer makes of marked tensors with the layer's name and piece; carry the marks to
   all that is made of it. What a block is given that layers have made must cross when the model is cut at that block.
   All else every piece makes for itself.
3. Where a piece begins, go on with fresh tensors, marked as received. A mark of an earlier piece on what a piece hands
   on says that something went around the boundary: refused.
4. The parameters that a piece needs are those of the layers it runs, and those marked on what it hands on.

Example: GPT(token, position, blocks 0 to 3, norm, out), cut at blocks.2. Piece 0 needs token, position and blocks 0
and 1, and hands on x. Piece 1 needs blocks 2 and 3, norm and out. Were out tied to token, both would need it.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from shoal.profile.transformers_private import unpacked_samples

_CPU = torch.device("cpu")

Call = Callable[[Any, Any], Any]
"""How a job calls its model: call(model, batch) returns the model's output."""


@dataclass(frozen=True)
class Split:
    """A model cut into pieces."""

    boundaries: tuple[str, ...]
    """The blocks at whose entry the second, third, ... piece begins."""
    parameters: tuple[tuple[str, ...], ...]
    """The parameters of each piece, by the first of their names."""
    tied: tuple[str, ...]
    """Parameters that more than one piece needs."""
    unused: tuple[str, ...]
    """Parameters that the model's output does not depend on."""
    layers: tuple[tuple[str, ...], ...]
    """The layers that each piece calls, those without parameters of earlier pieces included."""
    touched: tuple[tuple[str, ...], ...]
    """The parameters and buffers that each piece reads outside of layers, on its way to its first block or later."""
    rehearsal: "Rehearsal" = field(compare=False, repr=False)
    """What the pieces do with batches of other shapes."""


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


def split_model(
    call: Call, model: nn.Module, batch: Any, *, boundaries: Sequence[str], device: torch.device = _CPU
) -> Split:
    """Return what each piece needs when the model is cut at the entry of each of `boundaries`.

    `model` may be on meta, and only the shapes of `batch` matter. Raises PlanError where it cannot be cut so.
    """
    rehearsal = Rehearsal(call, model, boundaries, device=device)
    outline = rehearsal.outline(batch)
    names = [name for name, _ in model.named_parameters()]
    called = [_called(outline, piece) for piece in range(len(boundaries) + 1)]
    pieces = [_needed(model, rehearsal.layers, outline, piece) for piece in range(len(boundaries) + 1)]
    touched = [frozenset[str]().union(*outline.touched[: piece + 1]) for piece in range(len(boundaries) + 1)]
    reached = frozenset[str]().union(*outline.reached)
    return Split(
        boundaries=tuple(boundaries),
        parameters=tuple(tuple(name for name in names if name in needed) for needed in pieces),
        tied=tuple(name for name in names if sum(name in needed for needed in pieces) > 1),
        unused=tuple(name for name in names if name not in reached),
        layers=tuple(called),
        touched=tuple(tuple(sorted(read)) for read in touched),
        rehearsal=rehearsal,
    )


def _called(outline: Outline, piece: int) -> tuple[str, ...]:
    visits = [v for v in outline.visits if v.piece == piece or (v.piece < piece and v.is_remade)]
    return tuple(dict.fromkeys(visit.layer for visit in visits))


def _needed(model: nn.Module, layers: dict[str, nn.Module], outline: Outline, piece: int) -> frozenset[str]:
    first_names = {id(parameter): name for name, parameter in model.named_parameters()}
    run = {visit.layer for visit in outline.visits if visit.piece == piece}
    return outline.reached[piece] | {first_names[id(p)] for name in run for p in layers[name].parameters()}


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
            with process_untouched(), unpacked_samples(), self._fake:
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

"""One piece of a model in this process: it runs the model's own forward, with stand-ins for what came before.

1. Layers of earlier pieces answer with zeros of the shapes they would return; `split` has shown that no number of
   theirs reaches what this piece hands on.
2. At the entry of the piece's first block the received tensors take the place of those zeros.
3. At the entry of the next piece's first block the forward is left with what crosses there.

The piece's own layers are the model's very modules. A parameter that the model's forward reads without calling the
layer that holds it (a class token, a position table) is kept under a name of its own, and put back into its place
before each forward: FSDP exchanges a parameter where it finds it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from shoal.core.errors import PlanError
from shoal.parallel.building.materialise import Places, find_places
from shoal.parallel.pipeline.rehearsal import Call, Given, Outline, Visit
from shoal.parallel.pipeline.split import Split
from shoal.parallel.pipeline.torch_private import Shape, stood_in, tree_flatten, tree_unflatten
from shoal.profile.layers import find_layers

_CLAIMED: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()
"""Which piece of a model in this process has taken which parameter."""


class StageEnd(BaseException):
    """Leaves the model's forward where the next piece begins. Not an Exception: no model is to catch it."""

    def __init__(self, crossing: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.crossing = crossing


class Stage(nn.Module):
    """Piece number `piece` of `model`, which may be on meta.

    `named_parameters()` are the parameters of the piece, each under "own." and its name in the model; `names` gives for
    each the first of its names there, as in `split.parameters`. Shard or wrap the stage, then materialise it.
    """

    def __init__(self, model: nn.Module, split: Split, piece: int, *, call: Call, device: torch.device) -> None:
        super().__init__()
        self.piece, self.pieces = piece, len(split.parameters)
        self.device = device
        self._held = (model, call)  # in a tuple: the model is not part of the stage's own tree
        self._rehearsal = split.rehearsal
        self._layers = find_layers(model)[0]
        self._zeros: dict[Shape, Tensor] = {}
        _claim(model, split, piece)
        self.own = nn.Module()
        own_layers = [name for name in split.layers[piece] if any(True for _ in self._layers[name].parameters())]
        for name in own_layers:
            path, _, key = name.rpartition(".")
            _container(self.own, path).add_module(key, self._layers[name])
        first_names = {id(p): name for name, p in model.named_parameters()}
        self.places = find_places(model, self.own)
        self._keep_apart(model, split.parameters[piece])
        self.names = {name: first_names[id(p)] for name, p in self.named_parameters()}
        everywhere = find_places(model)
        self._lent = _loans(everywhere, self.places)
        self._absent = tuple(f"{name}." for name in self._layers if name not in split.layers[piece])
        self._touched = frozenset(split.touched[piece])
        self._blanks = [
            (module, attribute, Shape(tuple(tensor.shape), tensor.dtype))
            for name, anywhere in everywhere.items()
            for module, attribute in anywhere
            if name in self._touched - self.places.keys() and (tensor := module._parameters[attribute]) is not None
        ]
        self.training = model.training

    def _keep_apart(self, model: nn.Module, parameters: tuple[str, ...]) -> None:
        """Take in the parameters that are in none of the piece's own layers, each under its name in the model."""
        for name in parameters:
            if name not in self.places:
                path, _, attribute = name.rpartition(".")
                container = _container(self.own, path)
                container.register_parameter(attribute, model.get_parameter(name))
                self.places[name] = [(container, attribute)]

    def forward(self, *received: Tensor, batch: Any) -> Any:
        """Return what crosses to the next piece, as a tuple; of the last piece, what the model returns."""
        model, call = self._held
        run = _Run(self, self.outline(batch), self._rehearsal.boundaries, tuple(map(_Received.apply, received)))
        try:
            with self._set(), stood_in(model, self._layers, run.visit):
                return call(model, batch)
        except StageEnd as end:
            return tuple(map(_sendable, end.crossing))

    @contextmanager
    def _set(self) -> Iterator[None]:
        """Put the parameters of the piece where the model reads them, and zeros where it reads those of others."""
        for owner, attribute, home, home_attribute in self._lent:
            owner._parameters[attribute] = getattr(home, home_attribute)
        held = [module._parameters[attribute] for module, attribute, _ in self._blanks]
        try:
            for module, attribute, shape in self._blanks:
                # One zero, seen as many: a vocabulary's worth of them would take memory.
                blank = torch.zeros((), dtype=shape.dtype, device=self.device).expand(shape.sizes)
                module._parameters[attribute] = nn.Parameter(blank, requires_grad=False)
            yield
        finally:
            for (module, attribute, _), parameter in zip(self._blanks, held, strict=True):
                module._parameters[attribute] = parameter

    def outline(self, batch: Any) -> Outline:
        """Return what a call of the model with `batch` does: what crosses each boundary, what each layer returns."""
        return self._rehearsal.outline(batch, training=self.training)

    def train(self, mode: bool = True) -> "Stage":
        """Put the piece into training or evaluation, with what the model has outside of its layers."""
        super().train(mode)
        self._held[0].train(mode)
        return self

    def materialise(self, real: Callable[[str], Tensor]) -> None:
        """Give the piece its numbers: `real(name)` returns those of a parameter or buffer, asked for one at a time."""
        for name, places in self.places.items():
            asked = places[0][0]._parameters[places[0][1]]
            assert asked is not None
            parameter = nn.Parameter(real(name).to(self.device), requires_grad=asked.requires_grad)
            for module, attribute in places:
                module._parameters[attribute] = parameter
        self.materialise_rest(real)

    def materialise_rest(self, real: Callable[[str], Tensor]) -> None:
        """Give the buffers their numbers: what is left for a caller who fills the parameters by `places` himself."""
        for prefix, module in self._held[0].named_modules():
            for attribute, buffer in module._buffers.items():
                name = f"{prefix}.{attribute}" if prefix else attribute
                is_here = not name.startswith(self._absent) or name in self._touched
                if buffer is not None and is_here:
                    module._buffers[attribute] = real(name).to(self.device)

    def zeros(self, shape: Shape) -> Tensor:
        """Return zeros of `shape`: made once, for nobody ever looks at them."""
        if shape not in self._zeros:
            self._zeros[shape] = shape.tensor(self.device, torch.zeros)
        return self._zeros[shape].detach()  # an alias: what is done to it in place leaves no graph on the one kept


class _Run:
    """One forward of a piece: answers the calls of the model's layers, one after the other."""

    def __init__(self, stage: Stage, outline: Outline, boundaries: tuple[str, ...], received: Any) -> None:
        self._stage, self._outline, self._boundaries, self._received = stage, outline, boundaries, received
        self._visits = iter(outline.visits)

    def visit(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        """Return what the layer returns, or what stands in for it; raise StageEnd where the next piece begins."""
        piece, visit = self._stage.piece, next(self._visits, None)
        if visit is None or visit.layer != name:
            expected = repr(visit.layer) if visit is not None else "no layer"
            raise PlanError(
                f"the model called {name!r} where it called {expected} when it was traced: its course depends on the "
                "numbers, and such a model cannot be cut. Train it with mesh.pipeline=1."
            )
        if visit.piece > piece:
            leaves = tree_flatten((args, kwargs))[0]
            positions = {slot: index for index, slot in self._outline.positions[piece].items()}
            raise StageEnd(tuple(leaves[positions[slot]] for slot in sorted(positions)))
        if visit.piece < piece and not visit.is_remade:
            return self._stand_in(visit, args, kwargs)
        if piece > 0 and name == self._boundaries[piece - 1]:
            args, kwargs = self._with_received(args, kwargs)
        return layer(*args, **kwargs)

    def _with_received(self, args: Any, kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        for index, slot in self._outline.positions[self._stage.piece - 1].items():
            leaves[index] = self._received[slot]
        return tree_unflatten(leaves, structure)

    def _stand_in(self, visit: Visit, args: Any, kwargs: Any) -> Any:
        given = tree_flatten((args, kwargs))[0]
        leaves = [
            given[leaf.position]
            if isinstance(leaf, Given)
            else self._stage.zeros(leaf)
            if isinstance(leaf, Shape)
            else leaf
            for leaf in visit.outputs
        ]
        return tree_unflatten(leaves, visit.structure)


class _Received(torch.autograd.Function):
    """What was received, with a gradient that can be sent back: contiguous, whatever the model makes of it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:  # noqa: ARG004
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ARG004
        return gradient.contiguous()


def _sendable(tensor: Tensor) -> Tensor:
    """Return `tensor`, or a copy where it is not contiguous, or a view, which torch's zero-bubble cannot detach."""
    return tensor.clone(memory_format=torch.contiguous_format) if tensor._is_view() else tensor.contiguous()


def _container(root: nn.Module, path: str) -> nn.Module:
    for key in path.split(".") if path else []:
        if key not in root._modules:
            root.add_module(key, nn.Module())
        root = root.get_submodule(key)
    return root


def _loans(everywhere: Places, places: Places) -> list[tuple[nn.Module, str, nn.Module, str]]:
    """Return (owner, attribute, home, attribute at home) for what the model has in places that are not the piece's."""
    loans = []
    for name, anywhere in everywhere.items():
        if name in places:
            loans += [(*place, *places[name][0]) for place in anywhere if place not in places[name]]
    return loans


def _claim(model: nn.Module, split: Split, piece: int) -> None:
    claimed = _CLAIMED.setdefault(model, {})
    for name in split.tied:
        if name in split.parameters[piece] and claimed.setdefault(name, piece) != piece:
            raise PlanError(
                f"{name!r} is needed by the pieces {claimed[name]} and {piece}, both on one worker, which can hold it "
                "only once. Use more stages, fewer chunks, or other cut points with Job(stages=...)."
            )

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

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shoal.parallel.pipeline.rehearsal import Call, Outline, Rehearsal

_CPU = torch.device("cpu")


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
    rehearsal: Rehearsal = field(compare=False, repr=False)
    """What the pieces do with batches of other shapes."""


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

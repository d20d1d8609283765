"""What a server owns: a slice of the parameters, the optimizer over it, and how far it has come.

It knows nothing of connections: a primary and its replica each have one, do the same updates in the same order, and so
hold the same bits. All of it can be written down as a header and tensors (`save`), from which another is made (`load`).
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.sync.server.slices import SCALARS, build_optimizer, set_groups
from shoal.sync.server.tickets import Done

_TOLD_STEPS = 64
"""Of so many steps a shard knows what their parts were: more than lie between the fastest and the slowest worker."""


class Shard:
    """A slice, with its optimizer. `description` has the optimizer's name, its settings, and [numel, group] of pieces.

    `version` is the last step that was applied, `told` what was in it; asynchronously, `done` are the tickets applied.
    """

    def __init__(self, description: dict[str, Any], flat: Tensor) -> None:
        self.description, self.flat = description, flat
        self.sum = torch.zeros(flat.numel() if description["gathers"] else 0, dtype=flat.dtype)
        """Asynchronously, what has come of the step that is being gathered."""
        self.version: int = description["version"]
        self.told: dict[str, Any] = description["told"]
        self.done = Done(description["oldest"], set(description["beyond"]))
        numels = [numel for numel, _ in description["pieces"]]
        self._numels, self._pieces = numels, list(torch.split(flat, numels))
        groups = [group for _, group in description["pieces"]]
        pairs = list(zip(self._pieces, groups, strict=True))
        self._optimizer = build_optimizer(description["optimizer"], description["settings"], pairs)

    def update(self, gradient: Tensor, settings: Sequence[dict[str, Any]]) -> None:
        """Do a step of the optimizer with a flat gradient, under `settings`."""
        set_groups(self._optimizer, settings)
        for piece, part in zip(self._pieces, torch.split(gradient, self._numels), strict=True):
            piece.grad = part
        self._optimizer.step()
        for piece in self._pieces:
            piece.grad = None

    def add(self, mark: dict[str, Any], gradient: Tensor, settings: Sequence[dict[str, Any]], *, scale: float) -> None:
        """Add the gradient of a ticket, times `scale`; the last of as many as a step has parts does the step.

        Told is [worker, weight, loss] of each, by step, of the last few steps.
        """
        if scale:
            self.sum.add_(gradient, alpha=scale)
        self.done.add(mark["ticket"])
        if self.done.count % self.description["workers"] == 0:
            self.update(self.sum, settings)
            self.sum.zero_()
        step = str(mark["ticket"] // self.description["workers"] + 1)
        self.told.setdefault(step, []).append([mark["worker"], mark["weight"], mark["loss"]])
        if len(self.told) > _TOLD_STEPS:
            del self.told[min(self.told, key=int)]

    def save(self) -> tuple[dict[str, Any], list[Tensor]]:
        """Return all of it: what `load` makes another from."""
        kept = list(self._kept())
        header = {
            **self.description,
            "version": self.version,
            "told": self.told,
            "oldest": self.done.oldest,
            "beyond": sorted(self.done.beyond),
            "state": [(piece, name, str(value.dtype).removeprefix("torch.")) for piece, name, value in kept],
        }
        return header, [self.flat, self.sum, *(value.reshape(-1) for _, _, value in kept)]

    def _kept(self) -> Iterator[tuple[int, str, Tensor]]:
        for number, piece in enumerate(self._pieces):
            for name, value in self._optimizer.state.get(piece, {}).items():
                if value is not None:
                    yield number, name, torch.as_tensor(value)

    def keep(self, piece: int, name: str, value: Tensor) -> None:
        """Take what an optimizer has kept for a piece."""
        self._optimizer.state[self._pieces[piece]][name] = value.reshape(()) if name in SCALARS else value


def room_for(header: dict[str, Any]) -> list[Tensor]:
    """Return empty tensors for what `Shard.save` gave with that header."""
    numels = [numel for numel, _ in header["pieces"]]
    flat = torch.empty(sum(numels), dtype=getattr(torch, header["dtype"]))
    return [
        flat,
        torch.empty(flat.numel() if header["gathers"] else 0, dtype=flat.dtype),
        *(
            torch.empty(1 if name in SCALARS else numels[piece], dtype=getattr(torch, dtype))
            for piece, name, dtype in header["state"]
        ),
    ]


def load(header: dict[str, Any], tensors: Sequence[Tensor]) -> Shard:
    """Return the shard that was saved."""
    shard = Shard(header, tensors[0])
    shard.sum = tensors[1]
    for (piece, name, _), value in zip(header["state"], tensors[2:], strict=True):
        shard.keep(piece, name, value)
    return shard

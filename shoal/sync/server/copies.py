"""A worker's copies of what the servers own: two rows, of all gradients and of all parameters, and the ways in and out.

Servers and links see rows in the processor's memory; the job sees its parameters, wherever they are, and at boundaries
what its optimizer keeps for each of them.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.sync.mode import Trained
from shoal.sync.server.shard import Shard
from shoal.sync.server.slices import SCALARS, Slice, cut, groups_of, settings_of


class Copies:
    """The rows, cut into one slice for each of `servers`."""

    def __init__(self, trained: Trained, *, servers: int) -> None:
        self._trained = trained
        self.parameters = list(trained.parameters.values())
        groups = groups_of(trained.parameters, trained.optimizer)
        numels = [parameter.numel() for parameter in self.parameters]
        self.slices = cut(numels, groups, servers)
        self.dtype = self.parameters[0].dtype
        self.gradients = torch.zeros(sum(numels), dtype=self.dtype)
        self.row = torch.zeros(sum(numels), dtype=self.dtype)
        self.begins = [sum(numels[:number]) for number in range(len(numels))]

    def take_gradient(self, number: int) -> None:
        """Copy the gradient of a parameter into the row; one that has none counts as zero."""
        gradient = self.parameters[number].grad
        place = self._part(self.gradients, number)
        if gradient is None:
            place.zero_()
        else:
            place.copy_(gradient)

    def take_gradients(self) -> None:
        """Copy all gradients into the row."""
        for number in range(len(self.parameters)):
            self.take_gradient(number)

    @torch.no_grad()
    def give_parameter(self, number: int) -> None:
        """Copy a parameter out of the row."""
        self.parameters[number].copy_(self._part(self.row, number))

    def give_parameters(self) -> None:
        """Copy all parameters out of the row."""
        for number in range(len(self.parameters)):
            self.give_parameter(number)

    @torch.no_grad()
    def give_state(self, saved: Sequence[tuple[dict[str, Any], list[Tensor]]]) -> None:
        """Give the job's optimizer what those of all servers keep, as `Shard.save` has it, in the order of slices."""
        optimizer = self._trained.optimizer
        rows: dict[tuple[int, str], Tensor] = {}
        for of, (header, tensors) in zip(self.slices, saved, strict=True):
            for (piece, name, _), value in zip(header["state"], tensors[2:], strict=True):
                at = of.pieces[piece]
                parameter = self.parameters[at.parameter]
                if name in SCALARS:
                    rows[at.parameter, name] = value.reshape(())
                else:
                    empty = torch.empty(parameter.numel(), dtype=value.dtype)
                    rows.setdefault((at.parameter, name), empty)[at.begin : at.end] = value
        for (number, name), row in rows.items():
            parameter = self.parameters[number]
            value = row if name in SCALARS else row.view(parameter.shape)
            here = optimizer.state[parameter].get(name)
            if isinstance(here, Tensor) and here.shape == value.shape:
                here.copy_(value)
            else:
                optimizer.state[parameter][name] = value if name in SCALARS else value.to(parameter.device)

    @torch.no_grad()
    def shard(self, of: Slice, *, version: int, workers: int, gathers: bool) -> Shard:
        """Return a slice as this worker has it: parameters, and what the job's optimizer keeps for them."""
        optimizer = self._trained.optimizer
        for number, parameter in enumerate(self.parameters):
            self._part(self.row, number).copy_(parameter)
        description = {
            "optimizer": type(optimizer).__name__,
            "settings": settings_of(optimizer),
            "pieces": [(piece.end - piece.begin, piece.group) for piece in of.pieces],
            "dtype": str(self.dtype).removeprefix("torch."),
            "version": version,
            "told": {},
            "workers": workers,
            "gathers": gathers,
            "oldest": version * workers,
            "beyond": [],
        }
        shard = Shard(description, self.row[of.begin : of.end].clone())
        for number, name, value in self._kept(of):
            shard.keep(number, name, value)
        return shard

    def _kept(self, of: Slice) -> Iterator[tuple[int, str, Tensor]]:
        for number, piece in enumerate(of.pieces):
            state = self._trained.optimizer.state.get(self.parameters[piece.parameter], {})
            for name, value in state.items():
                if value is not None:
                    tensor = torch.as_tensor(value).detach().cpu().clone()
                    yield (
                        number,
                        name,
                        tensor if name in SCALARS else tensor.reshape(-1)[piece.begin : piece.end].clone(),
                    )

    def _part(self, row: Tensor, number: int) -> Tensor:
        parameter = self.parameters[number]
        return row[self.begins[number] : self.begins[number] + parameter.numel()].view(parameter.shape)

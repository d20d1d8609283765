"""What the next forward and backward will change of a worker's state: copied after each step, for it is little.

With this, the live parameters and optimizer are the state after that step until the next update, whatever becomes of
the step in between. (What a codec keeps is as much as the gradients: it is copied only where there is a codec.)
"""

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from shoal.fault.shards import Shard
from shoal.parallel.layout import local_of
from shoal.training.saved_codec import codec_shards
from shoal.training.saved_random import RandomStates

if TYPE_CHECKING:
    from shoal.training.run import Run


class Noted:
    """Buffers, random states and what a codec keeps, as they were after the last step."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._tensors: dict[str, Tensor] = {}
        self._codec: dict[str, Shard] = {}
        self.random = RandomStates(run.device)
        """The random states."""

    def take(self) -> None:
        """Copy them, as they are now."""
        run = self._run
        for name, buffer in run.model.named_buffers():
            if buffer.device.type != "meta":
                self._copy(f"buffer/{name}", local_of(buffer.detach()))
        if run.feedback is not None:
            self._copy_codec({shard.name: shard for shard in codec_shards(run)})
        self.random = RandomStates(run.device)

    def put_into(self, shards: list[Shard]) -> list[Shard]:
        """Return live slices with what was noted in the place of what is live, and what the codec keeps."""
        found = [dataclasses.replace(s, tensor=self._tensors.get(s.name, s.tensor)) for s in shards]
        return found + [dataclasses.replace(s, tensor=self._tensors[name]) for name, s in self._codec.items()]

    def _copy_codec(self, kept: dict[str, Shard]) -> None:
        for name in self._codec.keys() - kept.keys():
            self._tensors[name].zero_()  # nothing is pending there now
        for name, shard in kept.items():
            self._copy(name, shard.tensor)
        self._codec |= kept

    def _copy(self, name: str, tensor: Tensor) -> None:
        noted = self._tensors.get(name)
        if noted is None or noted.shape != tensor.shape:
            self._tensors[name] = tensor.detach().clone(memory_format=torch.contiguous_format)
        else:
            noted.copy_(tensor)


def part_of(run: "Run", *, is_divided: bool) -> tuple[int, int]:
    """Return which part of how many a worker holds, or copies where copying is divided among replicas."""
    position, mesh = run.position, run.plan.mesh
    parts = mesh.pipeline * mesh.shard * mesh.tensor
    if is_divided or parts == mesh.workers:
        return run.rank.index, mesh.workers
    return (position.pipeline * mesh.shard + position.shard) * mesh.tensor + position.tensor, parts


def meets_to_save(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether it keeps what only all workers together can name: means of rows of sharded matrices."""
    return any(
        isinstance(value, DTensor) and value.shape != parameter.shape
        for parameter, state in optimizer.state.items()
        for value in state.values()
    )


class StateCopy:
    """A copy of a worker's whole state, in its own memory; `step` is -1 while there is none, or while it is written."""

    def __init__(self) -> None:
        self.step = -1
        self.shards: list[Shard] = []
        self.alike: dict[str, Any] = {}

    def take(self, shards: list[Shard], step: int, alike: dict[str, Any]) -> None:
        """Copy `shards`, live, as they are after `step`, and what all workers have alike then."""
        self.step = -1
        held = {(shard.name, shard.offset): shard.tensor for shard in self.shards}
        self.shards = [_copied(shard, held.get((shard.name, shard.offset))) for shard in shards]
        self.step, self.alike = step, alike


def _copied(shard: Shard, into: Tensor | None) -> Shard:
    if into is None or into.shape != shard.tensor.shape:
        into = torch.empty_like(shard.tensor, memory_format=torch.contiguous_format)
    return dataclasses.replace(shard, tensor=into.copy_(shard.tensor))

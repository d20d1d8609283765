"""What one worker holds of a model under a plan."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal.comm.collectives import ProcessGroup, Waiting, gather_parts
from shoal.comm.mesh import data_group
from shoal.parallel.building.materialise import shard_of
from shoal.parallel.exact.dropout import ExactDropout
from shoal.parallel.shard import sum_scalars
from shoal.parallel.tensor.divide import Division, finish_gradients, tensor_context
from shoal.parallel.tensor.torch_private import timed_collectives


@dataclass
class Layout:
    """What one worker holds of a model, and what the engines want to know of it."""

    model: nn.Module
    """As the job built it, cut in place."""
    roots: Sequence[nn.Module]
    """What runs: the model, or this worker's pieces of it."""
    parameters: dict[str, nn.Parameter]
    """Those this worker trains, by their names in the model; a tied one by its first."""
    parts: dict[str, float]
    """What each of them counts in the norm of the whole gradient: see `gradients`."""
    trained: Mapping[str, torch.Tensor]
    """All parameters that are trained, on any worker, by name: of the type and shape that the job gave them."""
    dropout: ExactDropout
    meets: bool
    """Whether workers with different samples meet in every forward."""
    division: Division | None = None
    mesh: DeviceMesh | None = None
    waiting: Waiting | None = None
    """Entered while divided layers wait for communication."""
    take_over: Callable[[], None] = lambda: None
    """Adds to the gradients what a codec had not sent while there was somebody to send it to."""
    agree: Callable[[], None] = lambda: None
    """Makes those gradients the same that workers of the tensor axis hold alike, where a codec has made them differ."""
    sum_tied: Callable[[], None] = lambda: None
    """Sums the gradients of weights that several stages of a pipeline share. Called by every worker."""
    why_whole: str = ""
    """Why this worker has held the whole model while building it, if it has."""
    draws: bool = field(default=True)
    """Whether the model draws random numbers in its forward: assumed until the first step has shown it."""

    @functools.cached_property
    def scalars(self) -> list[nn.Parameter]:
        """The parameters without dims, which FSDP2 leaves alone."""
        return [parameter for parameter in self.parameters.values() if parameter.dim() == 0]

    @contextlib.contextmanager
    def contexts(self) -> Iterator[None]:
        """Be ready for a forward and backward pass."""
        with contextlib.ExitStack() as stack:
            if self.division is not None:
                stack.enter_context(tensor_context())
                stack.enter_context(timed_collectives(self.waiting) if self.waiting else contextlib.nullcontext())
            if self.draws:
                stack.enter_context(self.dropout)
            yield

    def end_step(self) -> None:
        """Look for random numbers no longer after a step without any: the looking costs a microsecond an operation."""
        if self.draws and not self.dropout.was_used:
            self.draws = False
            self.dropout.remove()

    def engine_holds(self) -> list[torch.Tensor]:
        """Return what an engine keeps of the parameters, beside what the model shows of them."""
        return []

    def finish_gradients(self) -> None:
        """Bring the gradients to where the engines have not brought them. Called by every worker, after backward."""
        if self.division is not None:
            for root in self.roots:
                finish_gradients(root)
        if self.mesh is not None and self.scalars and self.meets:
            sum_scalars(self.scalars, data_group(self.mesh))
        self.take_over()
        self.agree()
        self.sum_tied()  # after it: what is pending of a tied weight is each stage's own

    def close(self) -> None:
        """Let go of what must not outlive the group of all workers."""

    def whole(self, name: str) -> torch.Tensor:
        """Return the parameter `name` as it is in the job's model. Called by every worker that holds a slice of it."""
        parameter = self.parameters[name].detach()
        return self.whole_of(name, parameter, local_of(parameter))

    @torch.no_grad()
    def whole_of(self, name: str, parameter: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return the whole of which this worker holds `local`, cut as `parameter`, which is called `name`.

        Called by every worker that holds a slice of it.
        """
        if not isinstance(parameter, DTensor) or parameter.dim() == 0:
            return local
        assert self.mesh is not None
        cut = self.division.cuts.get(name) if self.division else None
        rows = parameter.shape[0] // (self.division.count if self.division and cut and cut.dim == 0 else 1)
        part = _joined_shards(local, rows, self.mesh.get_group("shard"))
        if self.division is None or cut is None:
            return part
        return self.division.whole_of(name, gather_parts(part.contiguous(), self.mesh.get_group("tensor")))

    @torch.no_grad()
    def part_of(self, name: str, parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
        """Return what this worker holds of `whole`, cut as `parameter`, which is called `name`."""
        if not isinstance(parameter, DTensor) or parameter.dim() == 0:
            return whole
        assert self.mesh is not None
        part = self.division.shard_of(name, whole) if self.division else whole
        return shard_of(part, shard=self.mesh.get_local_rank("shard"), shards=self.mesh["shard"].size())


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this worker holds of `tensor`, as a plain tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _joined_shards(local: torch.Tensor, rows: int, group: ProcessGroup) -> torch.Tensor:
    """Return the `rows` rows of which each worker of `group` has its slice; see `materialise.shard_of`."""
    if group.size() == 1:
        return local
    each = -(-rows // group.size())
    padded = torch.zeros(each, *local.shape[1:], dtype=local.dtype, device=local.device)
    padded[: len(local)] = local
    return torch.cat(gather_parts(padded, group))[:rows]

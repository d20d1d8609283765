"""Where a worker stands in the mesh, and the engine's picture of it.

Workers are numbered tensor first, then shard, then replicate, then pipeline: neighbours along `tensor` have numbers
next to each other. Example: pipeline=2, replicate=1, shard=2, tensor=2 has 8 workers; worker 5 is the second of its
tensor group, the first of its shards, on the second stage.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shoal.comm.collectives import ProcessGroup
from shoal.comm.torch_private import set_timeout
from shoal.spec.plan import Mesh

AXES = ("pipeline", "replicate", "shard", "tensor")


@dataclass(frozen=True, kw_only=True)
class Position:
    """Where a worker stands along each axis of `mesh`."""

    mesh: Mesh
    pipeline: int
    replicate: int
    shard: int
    tensor: int

    @property
    def data(self) -> int:
        """Which part of each global batch this worker takes; workers of one tensor group or pipeline share theirs."""
        return self.replicate * self.mesh.shard + self.shard

    @property
    def is_first_of_data(self) -> bool:
        """Whether it is the one worker of its data part that counts it."""
        return self.pipeline == 0 and self.tensor == 0


def position_of(mesh: Mesh, index: int) -> Position:
    """Return where worker `index` stands."""
    index, tensor = divmod(index, mesh.tensor)
    index, shard = divmod(index, mesh.shard)
    pipeline, replicate = divmod(index, mesh.replicate)
    return Position(mesh=mesh, pipeline=pipeline, replicate=replicate, shard=shard, tensor=tensor)


def device_mesh(mesh: Mesh, device: torch.device, *, timeout_s: float) -> DeviceMesh:
    """Return torch's mesh with the axes of `mesh`, by name.

    Called by every worker. A worker waits `timeout_s` at most for the others of an axis.
    """
    shape = tuple(getattr(mesh, axis) for axis in AXES)
    made = init_device_mesh(device.type, shape, mesh_dim_names=AXES)
    for group in [*made.get_all_groups(), data_group(made)]:
        set_timeout(group, timedelta(seconds=timeout_s))
    return made


def data_group(mesh: DeviceMesh) -> ProcessGroup:
    """Return the group of the workers that have the parts of one global batch: those of shard and replicate together.

    Called by every worker the first time, in `device_mesh`.
    """
    return mesh["replicate", "shard"]._flatten("data").get_group()

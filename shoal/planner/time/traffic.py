"""Who talks to whom, over which links, and what it takes: formulas 5 to 8 of docs/planner-model.md.

Workers are numbered tensor first, then shard, then replicate, then pipeline: the neighbours along `tensor` lie next to
each other. So the members of a group lie `stride` apart, `local` of them on each node that it spans. An all-reduce is a
reduce-scatter inside each node, a ring between the nodes and an all-gather inside (`collectives.two_level`); the
groups that meet on a node share its adapters. Where all workers are on one host's processor, replicas of whole models
and the shards of ZeRO meet in its shared memory, which has a rate of its own; tensor and pipeline use the engine.

Example: tensor=8, replicate=32 on nodes of 8 with 4 adapters of 25 GB/s. A tensor group is one node. Of a replicate
group each node has 1 worker, and 8 groups share 100 GB/s: 12.5 GB/s each, 2 * 31/32 * 9.8 GB take 1.5 s.
"""

from typing import NamedTuple

from shoal.planner.machine import Machine
from shoal.spec.device import Link
from shoal.spec.plan import Mesh
from shoal.spec.sync import Sync

_SYNC = Sync()


class Group(NamedTuple):
    """Workers that exchange something all together, and what each of them has of the links."""

    local: int
    """How many of them share a node."""
    nodes: int
    """How many nodes they lie on."""
    inside_bytes_per_s: float
    inside_latency_s: float
    between_bytes_per_s: float
    """Of one worker to other nodes, while its neighbours send as well."""
    between_latency_s: float
    in_memory: bool = False
    """Whether they meet in the shared memory of their host."""

    @property
    def size(self) -> int:
        """How many workers it has."""
        return self.local * self.nodes

    def gather_s(self, num_bytes: float) -> float:
        """Return how long it takes that each has all of `num_bytes`; reducing and scattering them takes the same."""
        inside, between = self.gather_bytes(num_bytes)
        seconds = 0.0
        if inside:
            seconds += (self.local - 1) * self.inside_latency_s + inside / self.inside_bytes_per_s
        if between:
            seconds += (self.nodes - 1) * self.between_latency_s + between / self.between_bytes_per_s
        return seconds

    def gather_bytes(self, num_bytes: float) -> tuple[float, float]:
        """Return what each worker sends for that: inside its node, and to others."""
        inside = num_bytes * (self.local - 1) / self.local
        return inside, num_bytes / self.local * (self.nodes - 1) / self.nodes

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return how long summing `num_bytes` over the group takes."""
        return 2 * self.gather_s(num_bytes)

    @property
    def slowest(self) -> tuple[float, float]:
        """The rate and the latency of a message from one of them to another, on the slowest way."""
        if self.nodes > 1:
            return self.between_bytes_per_s, self.between_latency_s
        return self.inside_bytes_per_s, self.inside_latency_s


def group_of(machine: Machine, *, size: int, stride: int, workers: int, memory: Link | None = None) -> Group:
    """Return the group of `size` of all `workers` that lie `stride` apart; `memory` is what they share, if they do."""
    here = min(workers, machine.per_node)
    local = min(size, max(1, machine.per_node // stride))
    inside = memory or machine.inside
    return Group(
        local=local,
        nodes=-(-size // local),
        inside_bytes_per_s=inside_bytes_per_s(machine, inside, neighbours=here),
        inside_latency_s=inside.latency_s,
        between_bytes_per_s=between_bytes_per_s(machine, senders=here),
        between_latency_s=machine.between.latency_s,
        in_memory=memory is not None,
    )


class Groups(NamedTuple):
    """The groups of a mesh, each as one of its workers sees it."""

    tensor: Group
    shard: Group
    replicate: Group
    data: Group
    """Shard and replicate together."""
    next_stage: Group
    """A worker and the one that it hands its micro-batches to."""


def groups_of(machine: Machine, mesh: Mesh, sync: Sync = _SYNC) -> Groups:
    """Return the groups that the workers of `mesh` form on `machine`, and by what those of `sync` meet."""
    workers = mesh.workers
    in_place, copied = _memories(machine, mesh, sync)
    stage = mesh.tensor * mesh.data
    crosses = workers > machine.per_node and mesh.pipeline > 1

    def group(size: int, stride: int, memory: Link | None = None) -> Group:
        return group_of(machine, size=size, stride=stride, workers=workers, memory=memory)

    return Groups(
        tensor=group(mesh.tensor, 1),
        shard=group(mesh.shard, mesh.tensor, copied),
        replicate=group(mesh.replicate, mesh.tensor * mesh.shard, in_place),
        data=group(mesh.data, mesh.tensor, in_place),
        next_stage=group(2, machine.per_node if crosses else stage)._replace(
            between_bytes_per_s=between_bytes_per_s(machine, senders=min(stage, machine.per_node))
        ),
    )


def exchange_overlaps(machine: Machine, groups: Groups) -> bool:
    """Return whether gradients and parameters travel beside computing; not where the same cores do both."""
    if groups.data.in_memory or groups.shard.in_memory:
        return False
    return (machine.between if groups.data.nodes > 1 else machine.inside).overlaps


def _memories(machine: Machine, mesh: Mesh, sync: Sync) -> tuple[Link | None, Link | None]:
    """Return what replicas sum in, and what shards are copied through, where it is shared memory (see meeting.py).

    A codec is the engine's to carry. It is left open whether `auto` takes one; on a fast link it seldom does.
    """
    if not machine.shared or mesh.workers > machine.per_node or sync.codec not in ("none", "auto"):
        return None, None
    sums = mesh.keeps_whole and sync.mode == "all-reduce" and sync.way in ("auto", "shared-memory")
    shards = mesh.shard > 1 and sync.way != "engine"
    return machine.in_place if sums else None, machine.copied if shards else None


def inside_bytes_per_s(machine: Machine, link: Link, *, neighbours: int) -> float:
    """Return what a worker has of a link inside its node.

    The rate of a processor's link is that between two workers alone; all share what carries it, its memory and cores.
    """
    return link.bytes_per_s * (min(1.0, 2 / neighbours) if machine.shared else 1.0)


def between_bytes_per_s(machine: Machine, *, senders: int) -> float:
    """Return what a worker has of its node's adapters while `senders` of the node send: at most one adapter's worth."""
    return machine.between.bytes_per_s * min(1.0, machine.adapters / senders)

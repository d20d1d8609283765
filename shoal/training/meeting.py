"""How the gradients of replicas meet in this run: decided when its workers start, by what joins them.

1. Workers alone, or that do not hold whole models, have nothing to decide: their engines exchange what they hold.
2. On GPUs the engine's own collective (NCCL) sums. Processors of one host sum in shared memory.
3. On several hosts the algorithm that their links make the fastest sums, on a thread of its own; where hosts have
   several workers, these meet in shared memory first, and slices travel between hosts. Links are measured for a second,
   or read from the cluster's file, if that names them.
4. With `sync.codec = "auto"` each codec is timed on this machine, and the one is taken, or none, with which the link
   that was measured gets to the same loss soonest (planner/collectives/choice.py).
5. The plan can say otherwise (`sync.way`, `sync.bucket_bytes`). What was decided, and why, is in the run folder.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import PrefixStore, Store

from shoal.comm.algorithms import ALL_REDUCE, Inside, Wire
from shoal.comm.algorithms.shared_inside import over_shared
from shoal.comm.algorithms.two_level import levels, two_level_with
from shoal.comm.group import new_group
from shoal.comm.link import agree_least, can_share_memory, link_from, time_inside
from shoal.comm.mesh import Position
from shoal.comm.rank import Rank
from shoal.comm.shm.group import SharedGroup, join
from shoal.compress.codecs import codec_named
from shoal.compress.collectives import GroupCollectives
from shoal.compress.feedback import ErrorFeedback
from shoal.core.errors import PlanError
from shoal.planner.collectives.choice import bucket_bytes, choose_codec, choose_way
from shoal.planner.collectives.compression import Setting
from shoal.planner.time.exchange import BUCKET_BYTES, SHARED_BUCKET_BYTES
from shoal.spec.communication import Communication
from shoal.spec.device import Link
from shoal.spec.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.background import Background, hook_of
from shoal.sync.compressed import CompressedAllReduce
from shoal.training.clock import StepClock
from shoal.training.codec_rates import measured_rates
from shoal.training.links import Place, hosts_of, links_of
from shoal.training.replicas import DdpReplicas, Replicas, SharedReplicas

_SHARED_S = 0.2
_SHARED_SIZES = (4 << 10, 4 << 20)
"""How long, and with how many bytes, the memory of a host is measured: there is little that could make it vary."""


@dataclass
class Meeting:
    """What the workers meet by; open for the length of a run."""

    communication: Communication
    shared: SharedGroup | None = None
    """All workers, where they are processors of one host."""
    neighbours: SharedGroup | None = None
    """Those of this host, where there are others: the inner of two levels."""
    background: Background | None = None
    exchange: Callable[[torch.Tensor], None] | None = None
    feedback: ErrorFeedback | None = None
    """The codec, and what it has not sent yet: part of the training state."""
    workers: GroupCollectives | None = None
    """How encoded gradients travel, in a group that the thread that sends them has for itself."""

    def replicas(self, module: nn.Module, *, clock: StepClock) -> Replicas:
        """Return this worker's copy of `module`, whose gradients meet those of the others. Called by every worker."""
        size = self.communication.bucket_bytes
        if self.shared is not None:
            return SharedReplicas(module, self.shared, bucket_bytes=size, clock=clock)
        hook = AllReduce(on_bucket=clock.note).hook
        if self.feedback is not None:
            assert self.workers is not None
            hook = CompressedAllReduce(
                self.feedback,
                dict(module.named_parameters()),
                self.workers,
                background=self.background,
                on_bucket=clock.note,
            ).hook
        elif self.exchange is not None and self.background is not None:
            hook = hook_of(self.background, self.exchange, clock.note)
        return DdpReplicas(module, hook, bucket_bytes=size, clock=clock, background=self.background)

    def close(self) -> None:
        """End what runs for it."""
        if self.background is not None:
            self.background.close()
        for group in (self.shared, self.neighbours):
            if group is not None:
                group.close()


def open_meeting(plan: Plan, place: Place, *, shapes: Sequence[torch.Size], seed: int) -> Meeting:
    """Return how gradients of these `shapes` meet. Called by every worker, in the group of all workers."""
    rank, store = place.rank, place.store
    if store is None or (not plan.mesh.keeps_whole and plan.sync.codec == "none"):
        why = "one worker" if store is None else "every worker holds a part of the model, which its engine exchanges"
        return Meeting(Communication(way="engine", why=why, bucket_bytes=BUCKET_BYTES))
    way = _wanted(plan, rank, place.device)
    if plan.sync.codec != "none":
        return _through_codec(plan, place, store, shapes=shapes, seed=seed)
    if way == "shared-memory":
        size = plan.sync.bucket_bytes or SHARED_BUCKET_BYTES
        why = f"{rank.workers} workers on processors of one host"
        shared = join(store, index=rank.index, count=rank.workers, timeout_s=plan.timeout_s)
        return Meeting(Communication(way=way, why=why, bucket_bytes=size), shared=shared)
    if way == "engine":
        size = plan.sync.bucket_bytes or BUCKET_BYTES
        why = "the plan says so" if plan.sync.way == way else "GPUs: NCCL knows their links"
        return Meeting(Communication(way=way, why=why, bucket_bytes=size))
    return _over_wires(plan, place, store)


def no_meeting(mode: str) -> Meeting:
    """Return what workers meet by who meet by a `mode` that sees to that itself."""
    return Meeting(
        Communication(way="engine", why=f"sync.mode={mode!r} has ways of its own", bucket_bytes=BUCKET_BYTES)
    )


def open_shards(
    plan: Plan, position: Position, *, rank: Rank, store: Store | None, device: torch.device
) -> SharedGroup | None:
    """Return the workers of this one's shard axis, if they can meet in shared memory. Called by every worker."""
    mesh = plan.mesh
    if store is None or mesh.shard == 1 or plan.sync.way == "engine" or not _can_share(rank, device):
        return None
    first = rank.index - position.shard * mesh.tensor
    numbers = [first + shard * mesh.tensor for shard in range(mesh.shard)]
    own = PrefixStore(f"shards of worker {first}", store)
    return join(own, index=position.shard, count=mesh.shard, timeout_s=plan.timeout_s, numbers=numbers)


def _can_share(rank: Rank, device: torch.device) -> bool:
    return rank.local_workers == rank.workers and can_share_memory(device)


def _through_codec(plan: Plan, place: Place, store: Store, *, shapes: Sequence[torch.Size], seed: int) -> Meeting:
    """Return a meeting through the plan's codec, or through the one that pays here; without any if none does."""
    group = new_group()
    name, why = plan.sync.codec, "the plan says so"
    inside = between = None
    if name == "auto" and plan.mesh.keeps_whole and _wanted(plan, place.rank, place.device) == "shared-memory":
        name, why = "none", "no codec pays here: gradients meet in the memory of one host, and travel nowhere"
    elif name == "auto":
        links = links_of(Wire(group, hosts=hosts_of(place.rank, store), watch=place.watch), place.known)
        inside, between = links.inside, links.between
        slow = between or inside
        assert slow is not None
        setting = _setting(plan, slow, sum(4 * shape.numel() for shape in shapes))
        choice = choose_codec(setting, measured_rates(place.device, agree_least), shapes=shapes)
        name, why = choice.name, choice.why
    if name == "none":
        plain = dataclasses.replace(plan, sync=dataclasses.replace(plan.sync, codec="none"))
        meeting = open_meeting(plain, place, shapes=shapes, seed=seed)
        meeting.communication = dataclasses.replace(meeting.communication, codec_why=why)
        return meeting
    size = plan.sync.bucket_bytes or BUCKET_BYTES
    said = Communication(
        way="engine",
        why="the codec decides",
        bucket_bytes=size,
        codec=name,
        codec_why=why,
        inside=inside,
        between=between,
    )
    background = Background(timeout_s=plan.timeout_s) if place.device.type == "cpu" else None
    feedback = ErrorFeedback(codec_named(name), seed=seed)
    return Meeting(said, feedback=feedback, workers=GroupCollectives(group, watch=place.watch), background=background)


def _setting(plan: Plan, link: Link, gradient_bytes: int) -> Setting:
    """Return where the question whether a codec pays is asked; computing as it was predicted."""
    predicted = plan.predicted
    compute_s = max(0.0, predicted.step_s - predicted.comm_s) if predicted else 0.0
    return Setting(
        num_bytes=gradient_bytes,
        workers=plan.mesh.data,
        link_bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        compute_s=compute_s,
        # Gradients travel while the rest of backward, half of the computing or so, goes on.
        overlap_s=compute_s / 2 if link.overlaps else 0.0,
    )


def _wanted(plan: Plan, rank: Rank, device: torch.device) -> str:
    """Return the way that the plan or the place decides; auto where the links do."""
    can_share = _can_share(rank, device)
    if plan.sync.way == "shared-memory" and not can_share:
        raise PlanError(
            "sync.way='shared-memory' is for workers on the processors of one Linux host. Use sync.way='auto'."
        )
    if plan.sync.way != "auto":
        return plan.sync.way
    if device.type != "cpu":
        return "engine"
    return "shared-memory" if can_share else "auto"


def _over_wires(plan: Plan, place: Place, store: Store) -> Meeting:
    """Return a meeting over point-to-point messages, by the plan's way or by that which the links make the fastest."""
    rank, hosts = place.rank, hosts_of(place.rank, store)
    wire = Wire(new_group(), hosts=hosts, watch=place.watch)
    links = links_of(wire, place.known)
    slow: Link | None = links.between or links.inside
    assert slow is not None
    per_host = rank.local_workers if len(set(map(hosts.count, hosts))) == 1 else 1
    neighbours = (
        _join_neighbours(plan, hosts, rank=rank, store=store) if _meet_inside(plan, per_host, place.device) else None
    )
    inside = over_shared(neighbours) if neighbours is not None else None
    copied = _copied_link(neighbours, inside) if neighbours is not None and inside is not None else None
    way = choose_way(
        workers=rank.workers,
        per_host=per_host,
        inside=copied or links.inside,
        between=slow,
        bucket=plan.sync.bucket_bytes,
    )
    name = way.name if plan.sync.way == "auto" else plan.sync.way
    if neighbours is not None and name != "two-level":
        neighbours.close()
        neighbours = inside = None
    size = plan.sync.bucket_bytes or bucket_bytes(slow, rank.workers)
    why = way.reason() if plan.sync.way == "auto" else "the plan says so"
    return Meeting(
        Communication(way=name, why=why, bucket_bytes=size, inside=links.inside, between=links.between, copied=copied),
        background=Background(timeout_s=plan.timeout_s),
        exchange=_exchange(name, wire, inside),
        neighbours=neighbours,
    )


def _exchange(name: str, wire: Wire, inside: Inside | None) -> Callable[[torch.Tensor], None]:
    """Return what sums a tensor by the algorithm `name`, or in two levels with the workers of a host as `inside`."""
    if inside is None:
        all_reduce = ALL_REDUCE[name]
        return lambda tensor: all_reduce(tensor, wire)
    _, between = levels(wire)
    return lambda tensor: two_level_with(tensor, wire, inside=inside, between=between)


def _meet_inside(plan: Plan, per_host: int, device: torch.device) -> bool:
    """Return whether workers of a host can meet in its memory, as the inner of two levels; the same on all hosts."""
    return per_host > 1 and plan.sync.way in ("auto", "two-level") and can_share_memory(device)


def _join_neighbours(plan: Plan, hosts: list[str], *, rank: Rank, store: Store) -> SharedGroup:
    """Return the workers of this one's host. Called by every worker."""
    numbers = [worker for worker, host in enumerate(hosts) if host == hosts[rank.index]]
    own = PrefixStore(f"host of worker {numbers[0]}", store)
    return join(own, index=numbers.index(rank.index), count=len(numbers), timeout_s=plan.timeout_s, numbers=numbers)


def _copied_link(neighbours: SharedGroup, inside: Inside) -> Link:
    """Return what copying through a host's memory takes, on the slowest host. Called by every worker."""
    times = time_inside(neighbours, inside, seconds=_SHARED_S, sizes=_SHARED_SIZES)
    # Not shared among more than the two that a link joins: all of them were at it when it was measured.
    link = link_from(times, workers=neighbours.count, shared=False, source="measured inside each host, in its memory")
    return dataclasses.replace(
        link, bytes_per_s=agree_least(link.bytes_per_s), latency_s=-agree_least(-link.latency_s), overlaps=False
    )

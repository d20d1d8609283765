"""How the gradients of replicas meet in this run: decided when its workers start, by what joins them.

1. What joins them was read or measured (links.py). A worker alone has nobody to meet; what a codec had not sent when
   there were others is given to its model.
2. Where workers hold parts of a model, and under modes and engines that see to it themselves, there is nothing to
   decide: these exchange what they hold.
3. On GPUs the engine's own collective (NCCL) sums. Processors of one host sum in shared memory.
4. On several hosts the algorithm that their links make the fastest sums (over_wires.py).
5. With `sync.codec = "auto"` a codec is taken in the place of that, if one pays (codec_choice.py).
6. The plan can say otherwise (`sync.way`, `sync.bucket_bytes`). What was decided, and why, is in the run folder.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed import PrefixStore, Store

from shoal.comm.group import new_group
from shoal.comm.link import can_share_memory
from shoal.comm.mesh import Position
from shoal.comm.rank import Rank
from shoal.comm.shm.group import SharedGroup, join
from shoal.compress.codecs import codec_named
from shoal.compress.collectives import GroupCollectives
from shoal.compress.feedback import ErrorFeedback
from shoal.core.errors import PlanError
from shoal.planner.collectives.buckets import PLAIN_BUCKET_BYTES, SHARED_BUCKET_BYTES, bucket_bytes
from shoal.planner.collectives.codecs import codec_for
from shoal.spec.communication import Communication
from shoal.spec.plan import Plan
from shoal.sync.allreduce import AllReduce
from shoal.sync.background import Background, hook_of
from shoal.sync.compressed import CompressedAllReduce
from shoal.training.clock import StepClock
from shoal.training.codec_choice import choose, kept_codec
from shoal.training.links import Place
from shoal.training.over_wires import open_wires
from shoal.training.replicas import DdpReplicas, Replicas, SharedReplicas

DEEPSPEED_BUCKET_BYTES = 4 * 500_000_000
"""Its own default, reduce_bucket_size: 5e8 numbers, in float32."""


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
    bucket_s: float | None = None
    """What a bucket takes by `exchange`, as far as links tell it."""
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

    def explained(self) -> AbstractContextManager[None]:
        """Return what backward runs in: what fails on the thread that sends is then raised as what it is."""
        return self.background.explained() if self.background is not None else nullcontext()

    def close(self) -> None:
        """End what runs for it."""
        if self.background is not None:
            self.background.close()
        for group in (self.shared, self.neighbours):
            if group is not None:
                group.close()


def open_meeting(plan: Plan, place: Place, *, shapes: Sequence[torch.Size], seed: int) -> Meeting:
    """Return how gradients of these `shapes` meet. Called by every worker, in the group of all workers.

    `place` is one whose links are known (links.located).
    """
    store = place.store
    if store is None:
        return _alone(plan, place, seed=seed)
    meeting = _opened(plan, place, store, shapes=shapes, seed=seed)
    meeting.communication = dataclasses.replace(
        meeting.communication, inside=place.links.inside, between=place.links.between
    )
    return meeting


def _alone(plan: Plan, place: Place, *, seed: int) -> Meeting:
    """Return the meeting of one worker: its codec sends nothing, and keeps what others have left until it is taken."""
    said = Communication(way="engine", why="one worker", bucket_bytes=plan.sync.bucket_bytes or PLAIN_BUCKET_BYTES)
    name = kept_codec(plan, place)[0] if plan.sync.codec == "auto" else plan.sync.codec
    has_codec = name not in ("", "none")
    return Meeting(said, feedback=ErrorFeedback(codec_named(name), seed=seed) if has_codec else None)


def _opened(plan: Plan, place: Place, store: Store, *, shapes: Sequence[torch.Size], seed: int) -> Meeting:
    if plan.sync.way == "shared-memory" and _own_way(plan) is None and not _can_share(place.rank, place.device):
        raise PlanError(
            "sync.way='shared-memory' is for workers on the processors of one Linux host. Use sync.way='auto'."
        )
    if plan.sync.codec not in ("none", "auto"):
        return _through_codec(plan, place, plan.sync.codec, "the plan says so", shapes=shapes, seed=seed)
    name, why = kept_codec(plan, place)
    if name:
        return _through_codec(plan, place, name, why, shapes=shapes, seed=seed)
    plain = _uncompressed(plan, place, store)
    if plan.sync.codec == "none":
        return plain
    name, why = choose(
        plan,
        place,
        shapes=shapes,
        in_memory=plain.shared is not None or _shards_share(plan, place.rank, place.device),
        bucket_bytes=plain.communication.bucket_bytes,
        bucket_s=plain.bucket_s,
    )
    if name != "none":
        plain.close()
        return _through_codec(plan, place, name, why, shapes=shapes, seed=seed)
    plain.communication = dataclasses.replace(plain.communication, codec_why=why)
    return plain


def _uncompressed(plan: Plan, place: Place, store: Store) -> Meeting:
    """Return a meeting without a codec."""
    rank = place.rank
    if plan.engine == "deepspeed":
        size = plan.sync.bucket_bytes or DEEPSPEED_BUCKET_BYTES
        return Meeting(Communication(way="engine", why="DeepSpeed exchanges what its workers hold", bucket_bytes=size))
    if (why := _own_way(plan)) is not None:
        size = plan.sync.bucket_bytes or PLAIN_BUCKET_BYTES
        return Meeting(Communication(way="engine", why=why, bucket_bytes=size))
    way = _wanted(plan, rank, place.device)
    if way == "shared-memory":
        size = plan.sync.bucket_bytes or SHARED_BUCKET_BYTES
        why = f"{rank.workers} workers on processors of one host"
        shared = join(store, index=rank.index, count=rank.workers, timeout_s=plan.timeout_s)
        return Meeting(Communication(way=way, why=why, bucket_bytes=size), shared=shared)
    if way == "engine":
        why = "the plan says so" if plan.sync.way == way else "GPUs: NCCL knows their links"
        return Meeting(Communication(way=way, why=why, bucket_bytes=_bucket_bytes(plan, place)))
    wires = open_wires(plan, place, store)
    return Meeting(
        wires.communication,
        background=Background(timeout_s=plan.timeout_s),
        exchange=wires.exchange,
        bucket_s=wires.bucket_s,
        neighbours=wires.neighbours,
    )


def _own_way(plan: Plan) -> str | None:
    """Return who else sees to it how gradients meet, if somebody does."""
    if plan.sync.mode not in ("all-reduce", "local"):
        return f"sync.mode={plan.sync.mode!r} has ways of its own"
    return None if plan.mesh.keeps_whole else "every worker holds a part of the model, which its engine exchanges"


def open_shards(
    plan: Plan, position: Position, *, rank: Rank, store: Store | None, device: torch.device
) -> SharedGroup | None:
    """Return the workers of this one's shard axis, if they can meet in shared memory. Called by every worker."""
    mesh = plan.mesh
    if store is None or not _shards_share(plan, rank, device):
        return None
    first = rank.index - position.shard * mesh.tensor
    numbers = [first + shard * mesh.tensor for shard in range(mesh.shard)]
    own = PrefixStore(f"shards of worker {first}", store)
    return join(own, index=position.shard, count=mesh.shard, timeout_s=plan.timeout_s, numbers=numbers)


def _can_share(rank: Rank, device: torch.device) -> bool:
    return rank.local_workers == rank.workers and can_share_memory(device)


def _shards_share(plan: Plan, rank: Rank, device: torch.device) -> bool:
    """Return whether the shards of ZeRO meet in the memory of one host."""
    return plan.mesh.shard > 1 and plan.sync.way != "engine" and _can_share(rank, device)


def _through_codec(
    plan: Plan, place: Place, name: str, why: str, *, shapes: Sequence[torch.Size], seed: int
) -> Meeting:
    """Return a meeting through the codec `name`."""
    size = _bucket_bytes(plan, place, ratio=codec_for(name, shapes).ratio)
    said = Communication(way="engine", why="the codec decides", bucket_bytes=size, codec=name, codec_why=why)
    meeting = Meeting(said, feedback=ErrorFeedback(codec_named(name), seed=seed))
    if plan.mesh.keeps_whole:  # else the engine that shards has its own groups, and waits
        meeting.workers = GroupCollectives(new_group(), watch=place.watch)
        meeting.background = Background(timeout_s=plan.timeout_s) if place.device.type == "cpu" else None
    return meeting


def _bucket_bytes(plan: Plan, place: Place, *, ratio: float = 1.0) -> int:
    """Return the size of a bucket of which `ratio` travels: the plan's, or what the link asks for."""
    return plan.sync.bucket_bytes or bucket_bytes(place.link_of(plan.mesh), plan.mesh.data, ratio=ratio)


def _wanted(plan: Plan, rank: Rank, device: torch.device) -> str:
    """Return the way that the plan or the place decides; auto where the links do."""
    if plan.sync.way != "auto":
        return plan.sync.way
    if device.type != "cpu":
        return "engine"
    return "shared-memory" if _can_share(rank, device) else "auto"

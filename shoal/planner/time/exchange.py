"""What the exchange of gradients and parameters costs a step: formulas 9 to 12 of docs/planner-model.md.

1. all-reduce: the gradients once a step, beside the backward of the last micro-batch, in buckets as large as the link
   asks for. What shows is the last bucket, or what that backward was too short to hide.
2. ZeRO, on FSDP2: parameters are gathered in the first forward of a step (ZeRO 1 and 2), or in every forward and
   backward (3). Gradients are reduced and scattered over the shards, then summed over the replicas: in the last
   micro-batch (1) or in every one (2 and 3). A layer's messages run beside the computing of its neighbours; the first
   one shows. In a pipeline all stages of ZeRO gather once a step, and scatter when its last backward is done: that
   shows whole. So does the all-reduce of replicas that are pipelines.
3. Replicas on one processor sum in shared memory. Each gradient is copied there when it is made, and summed in passing,
   bucket by bucket, by the core that computes: that lengthens the backward. What is left to wait for is the last
   bucket, and the engine's sum of the losses.
4. server: K servers take gradients and give parameters, after the backward. local: parameters meet every H steps.
   deadline: gradients are summed after the backward, in one row; nobody who is in time waits for one who is not.
5. A codec shrinks what travels and costs its encoding and decoding. What cannot be added encoded is gathered.
6. On a link that does not overlap, or with an engine that waits, everything shows.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from shoal.planner.collectives.allreduce import parameter_server
from shoal.planner.collectives.buckets import SHARED_BUCKET_BYTES, bucket_at
from shoal.planner.collectives.codecs import Codec, codec_of
from shoal.planner.collectives.compression import decoded_bytes
from shoal.planner.engine import frees_parameters, scatters_after, scatters_each
from shoal.planner.time.traffic import Group, Groups
from shoal.spec.plan import Plan


class Held(NamedTuple):
    """What one worker holds, and how long it computes on a micro-batch: what an exchange can hide behind."""

    gradient_bytes: float
    parameter_bytes: float
    layers: float
    forward_s: float
    backward_s: float
    micro_batches: int
    memory_bytes_per_s: float
    update_bytes_per_s: float
    """The same for memory that is there already."""


class Exchange(NamedTuple):
    """What shows of it in a step, and what one worker sends."""

    seconds: float
    inside_bytes: float = 0.0
    between_bytes: float = 0.0
    in_backward_s: float = 0.0
    """What the core that computes does of it in passing: it counts as computing."""


def exchange_of(plan: Plan, groups: Groups, held: Held, *, overlaps: bool) -> Exchange:
    """Return what the replicas and shards of `plan` cost one worker in a step."""
    if plan.mesh.data == 1:
        return Exchange(0.0)
    if plan.zero:
        return _zero(plan, groups, held, overlaps=overlaps)
    if groups.data.in_memory:
        return _in_memory(plan, groups, held)
    return _MODES[plan.sync.mode](plan, groups.data, held, overlaps and not scatters_after(plan))


def bucket_of(plan: Plan, group: Group) -> int:
    """Return the size of the buckets in which replicas exchange gradients: as the plan says, or as a run has them."""
    if plan.sync.bucket_bytes or group.in_memory:
        return plan.sync.bucket_bytes or SHARED_BUCKET_BYTES
    return bucket_at(*group.slowest, group.size, ratio=codec_of(plan.sync.codec).ratio)


def _all_reduce(plan: Plan, group: Group, held: Held, overlaps: bool) -> Exchange:
    codec = codec_of(plan.sync.codec)
    seconds, inside, between = _summed(codec, group, held.gradient_bytes)
    shown_s = seconds
    if overlaps:
        buckets = max(1, math.ceil(held.gradient_bytes / bucket_of(plan, group)))
        shown_s = max(seconds / buckets, seconds - held.backward_s)
    return Exchange(shown_s + _coding_s(plan, held, group.size), inside, between)


def _in_memory(plan: Plan, groups: Groups, held: Held) -> Exchange:
    seconds = groups.data.all_reduce_s(held.gradient_bytes)
    buckets = max(1, math.ceil(held.gradient_bytes / bucket_of(plan, groups.data)))
    copy_s = 2 * held.gradient_bytes / held.update_bytes_per_s
    inside, between = groups.data.gather_bytes(2 * held.gradient_bytes)
    # The losses go over the engine's link, the one that `tensor` has; elsewhere they are lost in what gradients take.
    losses_s = 2 * (groups.data.size - 1) * groups.tensor.inside_latency_s
    shown_s = seconds / buckets
    return Exchange(shown_s + losses_s, inside, between, in_backward_s=seconds - shown_s + copy_s)


def _server(plan: Plan, group: Group, held: Held, overlaps: bool) -> Exchange:  # noqa: ARG001
    encoded_bytes = codec_of(plan.sync.codec).ratio * held.gradient_bytes
    cost = parameter_server(encoded_bytes, group.size, *group.slowest, servers=plan.sync.servers)
    inside = encoded_bytes * (group.local - 1) / max(1, group.size - 1)
    return Exchange(cost.seconds + _coding_s(plan, held, 1), inside, encoded_bytes - inside)


def _local(plan: Plan, group: Group, held: Held, overlaps: bool) -> Exchange:  # noqa: ARG001
    every = plan.sync.local_steps
    seconds, inside, between = _summed(codec_of(plan.sync.codec), group, held.parameter_bytes)
    return Exchange((seconds + _coding_s(plan, held, group.size)) / every, inside / every, between / every)


def _deadline(plan: Plan, group: Group, held: Held, overlaps: bool) -> Exchange:  # noqa: ARG001
    return Exchange(*_summed(codec_of(plan.sync.codec), group, held.gradient_bytes))


_MODES: dict[str, Callable[[Plan, Group, Held, bool], Exchange]] = {
    "all-reduce": _all_reduce,
    "deadline": _deadline,
    "server": _server,
    "local": _local,
}


def _summed(codec: Codec, group: Group, num_bytes: float) -> tuple[float, float, float]:
    """Return the seconds, and the bytes sent inside and between nodes, until all have the sum."""
    encoded_bytes = codec.ratio * num_bytes
    if codec.travels in ("summed", "sliced"):
        inside, between = group.gather_bytes(2 * encoded_bytes)
        return codec.rounds * group.all_reduce_s(encoded_bytes / codec.rounds), inside, between
    all_bytes = encoded_bytes * group.size
    return group.gather_s(all_bytes), *group.gather_bytes(all_bytes)


def _coding_s(plan: Plan, held: Held, workers: int) -> float:
    if plan.sync.codec in ("none", "auto"):
        return 0.0
    codec = codec_of(plan.sync.codec)
    touched_bytes = held.gradient_bytes + decoded_bytes(codec, held.gradient_bytes, workers)
    return touched_bytes / held.memory_bytes_per_s


def _zero(plan: Plan, groups: Groups, held: Held, *, overlaps: bool) -> Exchange:
    shard, replicate = groups.shard, groups.replicate
    part_bytes = held.gradient_bytes / shard.size
    scattered_bytes = codec_of(plan.sync.codec).ratio * held.gradient_bytes
    reduce_s = shard.gather_s(scattered_bytes) + replicate.all_reduce_s(part_bytes)
    gather_s = shard.gather_s(held.parameter_bytes)
    reduces = held.micro_batches if scatters_each(plan) else 1
    gathers = 2 * held.micro_batches if frees_parameters(plan) else 1
    inside, between = shard.gather_bytes(gathers * held.parameter_bytes + reduces * scattered_bytes)
    more_inside, more_between = replicate.gather_bytes(2 * reduces * part_bytes)

    def shown_s(seconds: float, beside_s: float) -> float:
        return max(seconds / held.layers, seconds - beside_s) if overlaps else seconds

    if frees_parameters(plan):
        each_s = shown_s(gather_s, held.forward_s) + shown_s(gather_s + reduce_s, held.backward_s)
        seconds = held.micro_batches * each_s
    else:
        each_s = reduce_s if scatters_after(plan) else shown_s(reduce_s, held.backward_s)
        seconds = shown_s(gather_s, held.forward_s) + reduces * each_s
    seconds += reduces * _coding_s(plan, held, shard.size)
    return Exchange(seconds, inside + more_inside, between + more_between)

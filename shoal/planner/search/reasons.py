"""Why the obvious other plans lost: each is costed like every plan, and the dearest thing about it said in one line."""

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from shoal.core.units import format_bytes, format_seconds
from shoal.planner.memory.peak import needed_bytes, peak
from shoal.planner.search.search import Candidate
from shoal.planner.search.space import Shape, Space, Way
from shoal.planner.search.validate import room_bytes
from shoal.planner.time.steptime import StepTime, step_time
from shoal.planner.time.traffic import groups_of
from shoal.spec.plan import RECOMPUTE, Plan

Timed: TypeAlias = Callable[[Plan], StepTime]

_NOTICEABLE = 1.005
"""How many times as long a step must take to be called slower: less is nothing at any error bar."""


@dataclass(frozen=True, kw_only=True)
class _Alternative:
    """An obvious plan: its name, and among which ways to run it the best is looked for."""

    name: str
    shape: Shape
    zero: int = 0
    shard: int = 1
    recompute: tuple[str, ...] = RECOMPUTE
    micro_batches: tuple[int, ...] = ()
    """Those to try; empty: all."""
    schedules: tuple[tuple[str, int], ...] = ()
    """The same for (schedule, chunks)."""


@dataclass(frozen=True, kw_only=True)
class _Costed:
    plan: Plan
    time: StepTime
    needed_bytes: int


def why_others_lost(space: Space, winner: Candidate, *, timed: Timed | None = None) -> list[str]:
    """Return one line for each obvious alternative to `winner`; `timed` times a plan, in closed form unless given."""

    def closed(plan: Plan) -> StepTime:
        return step_time(space.profile, plan, space.machine, batch_size=space.batch_size)

    times = timed or closed
    winner = dataclasses.replace(winner, time=times(winner.plan))
    lines = []
    for alternative in _obvious(space, winner):
        line = _line(space, alternative, winner, times)
        if line:
            lines.append(line)
    return list(dict.fromkeys(lines))


def _obvious(space: Space, winner: Candidate) -> Iterator[_Alternative]:
    most = min(space.machine.workers, space.batch_size)
    if most > 1:
        yield _Alternative(name=f"replicate={most}", shape=Shape(1, 1, most))
        yield _Alternative(name=f"zero=3, shard={most}", shape=Shape(1, 1, most), zero=3, shard=most)
    yield from _divided(space)
    yield from _variants(winner)
    if space.machine.workers > winner.shape.workers:
        yield from _all_devices(space, winner)


def _divided(space: Space) -> Iterator[_Alternative]:
    """Yield tensor parallelism over a node and over two, and the deepest pipeline, with the rest as replicas."""
    here = space.machine.per_node
    degrees = [tensor for tensor, pipeline in space.degrees() if pipeline == 1]
    for tensor in (here, 2 * here):
        if tensor > 1 and tensor in degrees and (datas := space.datas(tensor, 1)):
            shape = Shape(tensor, 1, datas[0])
            zero = 1 if shape.data > 1 else 0
            yield _Alternative(name=f"tensor={tensor}", shape=shape, zero=zero, shard=shape.data if zero else 1)
    deepest = [(pipeline, datas[0]) for _, pipeline in space.degrees() if (datas := space.datas(1, pipeline))]
    pipeline, data = max(deepest, default=(1, 1))
    if pipeline > 1:
        yield _Alternative(name=f"pipeline={pipeline}", shape=Shape(1, pipeline, data))


def _variants(winner: Candidate) -> Iterator[_Alternative]:
    """Yield the winner with more and with less computed again, and with twice its micro-batch."""
    plan, size = winner.plan, winner.plan.batch.micro_batch or 1
    same = _Alternative(
        name="",
        shape=winner.shape,
        zero=plan.zero,
        shard=plan.mesh.shard,
        recompute=(plan.recompute,),
        micro_batches=(size,),
        schedules=((plan.schedule, plan.chunks),),
    )
    for recompute in RECOMPUTE:
        if recompute != plan.recompute:
            yield dataclasses.replace(same, name=f"recompute={recompute}", recompute=(recompute,))
    yield dataclasses.replace(same, name=f"micro_batch={2 * size}", micro_batches=(2 * size,))


def _all_devices(space: Space, winner: Candidate) -> Iterator[_Alternative]:
    """Yield the winner with as many replicas as there are devices for."""
    tensor, pipeline, data = winner.shape
    more = space.datas(tensor, pipeline)
    if more and more[0] > data and max(tensor, pipeline) > 1:
        shape = Shape(tensor, pipeline, more[0])
        zero = winner.plan.zero if winner.plan.zero and shape.data > 1 else 0
        shard = shape.data if zero else 1
        yield _Alternative(name=f"{shape.workers} devices", shape=shape, zero=zero, shard=shard)


def _line(space: Space, alternative: _Alternative, winner: Candidate, times: Timed) -> str | None:
    costed = list(_costed(space, alternative, times))
    if not costed:
        return None
    room = room_bytes(space.machine, alternative.shape.workers)
    fitting = [found for found in costed if room is None or found.needed_bytes <= room]
    if not fitting:
        least = min(found.needed_bytes for found in costed)
        return f"{alternative.name} does not fit: {format_bytes(least)} needed, {format_bytes(room or 0)} there"
    best = min(fitting, key=lambda found: found.time.step_s)
    if best.time.step_s < winner.step_s * _NOTICEABLE:
        return None  # it is the winner itself, or as good
    return f"{alternative.name}{_dearest(space, best, winner)} ({_slower(best, winner)})"


def _costed(space: Space, alternative: _Alternative, times: Timed) -> Iterator[_Costed]:
    shape, machine = alternative.shape, space.machine
    samples = -(-space.batch_size // shape.data)
    for way in _ways(space, alternative):
        plan = space.plan(shape, way)
        worst = peak(space.profile, plan, samples=samples, device=machine.device)
        yield _Costed(plan=plan, time=times(plan), needed_bytes=needed_bytes(worst, machine.device))


def _ways(space: Space, alternative: _Alternative) -> Iterator[Way]:
    for micro_batch in space.micro_batches(alternative.shape):
        if micro_batch in (alternative.micro_batches or (micro_batch,)):
            for schedule in space.schedules(alternative.shape, micro_batch):
                if schedule in (alternative.schedules or (schedule,)):
                    for recompute in alternative.recompute:
                        if recompute in space.recomputes:
                            yield Way(micro_batch, recompute, alternative.zero, alternative.shard, *schedule)


def _slower(found: _Costed, winner: Candidate) -> str:
    return f"{format_seconds(found.time.step_s)} a step, {found.time.step_s / winner.step_s:.2f}x"


def _dearest(space: Space, found: _Costed, winner: Candidate) -> str:
    """Return ": why", naming the part of the step that grew most against the winner's."""
    mine, theirs = found.time, winner.time
    grown = {
        "tensor": mine.tensor_s - theirs.tensor_s,
        "pipeline": mine.pipeline_s - theirs.pipeline_s,
        "data": mine.data_s - theirs.data_s,
        "bubble": mine.bubble_s - theirs.bubble_s,
        "compute": mine.compute_s - theirs.compute_s,
        "optimizer": mine.optimizer_s - theirs.optimizer_s,
    }
    part = max(grown, key=lambda name: grown[name])
    return {
        "tensor": _tensor,
        "pipeline": _pipeline,
        "data": _data,
        "bubble": _bubble,
        "compute": _compute,
        "optimizer": _optimizer,
    }[part](space, found, winner)


def _tensor(space: Space, found: _Costed, winner: Candidate) -> str:
    del winner
    group = groups_of(space.machine, found.plan.mesh).tensor
    crosses = " crosses nodes" if group.nodes > 1 else ""
    return f"{crosses}: {format_seconds(found.time.tensor_s)} of the step on {_rate(space, group.nodes > 1)} links"


def _pipeline(space: Space, found: _Costed, winner: Candidate) -> str:
    del winner
    crosses = groups_of(space.machine, found.plan.mesh).next_stage.nodes > 1
    sends_s = format_seconds(found.time.pipeline_s)
    return f": {sends_s} of the step sends to the next stage on {_rate(space, crosses)} links"


def _data(space: Space, found: _Costed, winner: Candidate) -> str:
    del winner
    groups = groups_of(space.machine, found.plan.mesh, found.plan.sync)
    what = "parameters and gradients" if found.plan.zero == 3 else "gradients"
    in_memory = groups.data.in_memory or groups.shard.in_memory
    where = "in shared memory" if in_memory else f"on {_rate(space, groups.data.nodes > 1)} links"
    return f": {format_seconds(found.time.data_s)} of the step waits for {what} {where}"


def _bubble(space: Space, found: _Costed, winner: Candidate) -> str:
    del winner
    part = -(-space.batch_size // found.plan.mesh.data)
    count = part // (found.plan.batch.micro_batch or part)
    return f": {found.time.bubble_s / found.time.step_s:.0%} bubble at {count} micro-batches"


def _compute(space: Space, found: _Costed, winner: Candidate) -> str:
    more = found.time.compute_s / winner.time.compute_s - 1
    if found.plan.recompute not in (winner.plan.recompute, "none"):
        return f": {more:.0%} more computing, for memory that is not needed"
    if found.plan.mesh.workers < winner.plan.mesh.workers:
        return f": only {found.plan.mesh.workers} of {space.machine.workers} devices compute"
    parts = found.plan.mesh.data
    if space.batch_size % parts and parts != winner.shape.data:
        most = -(-space.batch_size // parts)
        return f": {parts} parts of a batch of {space.batch_size}: those with {most - 1} wait for those with {most}"
    return f": {more:.0%} more computing, in smaller products"


def _optimizer(space: Space, found: _Costed, winner: Candidate) -> str:
    del space, winner
    return f": {format_seconds(found.time.optimizer_s)} of the step in the optimizer, on every replica"


def _rate(space: Space, between: bool) -> str:
    link = space.machine.between if between else space.machine.inside
    return f"{format_bytes(link.bytes_per_s)}/s"

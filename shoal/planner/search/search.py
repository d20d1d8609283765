"""The best plans for a model on a machine, found without looking at every one.

1. The pace of a (tensor, micro-batch, recompute) is what one sample takes to compute with an endless row of workers
   behind it: asked once of `step_time`. Divided over the stages and the parts of a batch it bounds the step from
   below: nobody computes faster, and everything else comes on top.
2. Shapes and their micro-batches are taken in the order of that bound, until it is beyond the worst of the best so far:
   what is left cannot be among them.
3. What is taken must fit into memory before its time is asked for. A cheap bound (training state spread evenly over
   all workers) refuses most of what does not.
4. Other schedules are tried where the step with even stages and hardly a bubble, other ways to synchronise where the
   step without its gradients' messages, would be among the best.

So the answer is that of trying all plans of the `space`, which a test does for small ones.
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from shoal.planner.machine import Machine
from shoal.planner.memory.peak import Peak, needed_bytes, peak
from shoal.planner.search.space import Shape, Space, Way
from shoal.planner.search.validate import room_bytes
from shoal.planner.time.steptime import StepTime, step_time
from shoal.spec.plan import RECOMPUTE, Plan
from shoal.spec.profile import Profile
from shoal.spec.sync import Sync

_TIE = 1 + 1e-9
"""Times that differ by less are the same, summed in another order: then less memory wins."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan with its cost."""

    shape: Shape
    plan: Plan
    time: StepTime
    peak: Peak

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.time.step_s

    @property
    def rank(self) -> tuple[float, int, int, int]:
        """Less is better: the time, then the memory, then the workers, then what is simpler."""
        return (float(f"{self.step_s:.9g}"), self.peak.peak_bytes, self.shape.workers, _complexity(self.plan))


@dataclass(kw_only=True)
class Found:
    """What a search came to."""

    best: list[Candidate]
    """The best plan of each of the best shapes, the fastest first."""
    lossy: Candidate | None = None
    """The fastest plan that trades exactness for speed."""
    looked_at: int = 0
    """How many plans were costed."""


def search(profile: Profile, machine: Machine, *, batch_size: int, keep: int = 5, lossy: bool = False) -> Found:
    """Return the best plan of each of the `keep` best shapes; with `lossy`, also plans that change the result, and
    servers: what cannot be run yet."""
    return _Search(Space(profile=profile, machine=machine, batch_size=batch_size), keep=keep, lossy=lossy).run()


@dataclass
class _Search:
    space: Space
    keep: int = field(kw_only=True)
    lossy: bool = field(kw_only=True)
    best: dict[Shape, Candidate] = field(default_factory=dict)
    best_lossy: Candidate | None = None
    looked_at: int = 0
    limit_s: float = math.inf
    """The step time of the last that is kept: more cannot be among the best."""
    paces: dict[tuple[int, int, str], float] = field(default_factory=dict)
    state_bytes: tuple[int, int, int] = (0, 0, 0)
    """Parameters, gradients, and the optimizer's state, of the whole model."""

    def __post_init__(self) -> None:
        profile = self.space.profile
        self.state_bytes = (profile.parameter_bytes, profile.gradient_bytes, profile.optimizer_bytes)

    def run(self) -> Found:
        for bound_s, shape, micro_batch, recompute in self._in_order_of_bound():
            if bound_s > self.limit_s:
                break
            self._try(shape, micro_batch, recompute)
        best = sorted(self.best.values(), key=lambda candidate: candidate.rank)[: self.keep]
        return Found(best=best, lossy=self.best_lossy, looked_at=self.looked_at)

    def _in_order_of_bound(self) -> Iterator[tuple[float, Shape, int, str]]:
        """Yield (bound_s, shape, micro_batch, recompute), least bound first; shapes with fewer workers come later."""
        queue: list[tuple[float, int, Shape, list[int], Iterator[tuple[float, int, str]], int, str]] = []
        order = itertools.count()

        def push_shape(tensor: int, pipeline: int, datas: list[int]) -> None:
            if datas:
                shape = Shape(tensor, pipeline, datas[0])
                push_next(shape, datas[1:], iter(self._bounds(shape)))

        def push_next(shape: Shape, fewer: list[int], rest: Iterator[tuple[float, int, str]]) -> None:
            for bound_s, micro_batch, recompute in rest:
                heapq.heappush(queue, (bound_s, next(order), shape, fewer, rest, micro_batch, recompute))
                return

        for tensor, pipeline in self.space.degrees():
            push_shape(tensor, pipeline, self.space.datas(tensor, pipeline))
        while queue:
            bound_s, _, shape, fewer, rest, micro_batch, recompute = heapq.heappop(queue)
            yield bound_s, shape, micro_batch, recompute
            push_next(shape, [], rest)
            push_shape(shape.tensor, shape.pipeline, fewer)

    def _bounds(self, shape: Shape) -> list[tuple[float, int, str]]:
        """Return (bound_s, micro_batch, recompute) of a shape, least bound first."""
        each = self.space.batch_size / shape.data / shape.pipeline
        return sorted(
            (each * self._pace(shape.tensor, micro_batch, recompute), micro_batch, recompute)
            for micro_batch in self.space.micro_batches(shape)
            for recompute in self.space.recomputes
        )

    def _pace(self, tensor: int, micro_batch: int, recompute: str) -> float:
        """Return the seconds that a sample takes through the whole model, with nothing to wait for but its tensors."""
        key = (tensor, micro_batch, recompute)
        if key not in self.paces:
            plan = self.space.plan(Shape(tensor, 1, 1), Way(micro_batch, recompute))
            time = step_time(self.space.profile, plan, self.space.machine, batch_size=micro_batch)
            self.paces[key] = (time.compute_s + time.tensor_s) / micro_batch
        return self.paces[key]

    def _try(self, shape: Shape, micro_batch: int, recompute: str) -> None:
        """Cost the ways to run `shape` so that may be among the best."""
        for zero, shard in self.space.shardings(shape):
            way = Way(micro_batch, recompute, zero, shard)
            if self._least_bytes(shape, way) > self._room_bytes(shape):
                continue
            plan, time = self._time(shape, way)
            if self._at_best_s(time, shape, way) <= self._worth_s(shape):
                self._try_syncs(self._fitting(shape, plan, time), way)
                self._try_schedules(shape, way)

    def _at_best_s(self, time: StepTime, shape: Shape, way: Way) -> float:
        """Return the step time with the shortest bubble, the most even stages and the fastest exchange there may be."""
        exchange_s = 0.0 if way.zero else time.data_s
        bubble_s = time.bubble_s * (1 - self.space.least_bubble(shape.pipeline))
        busy_s = time.compute_s + time.tensor_s  # 1f1b's bubble is a micro-batch on all stages but the slowest
        micro_batches = -(-self.space.batch_size // shape.data) / way.micro_batch
        even_s = (busy_s + micro_batches * time.bubble_s) / shape.pipeline
        return time.step_s - bubble_s - max(0.0, busy_s - even_s) - exchange_s

    def _try_schedules(self, shape: Shape, way: Way) -> None:
        for schedule, chunks in self.space.schedules(shape, way.micro_batch)[1:]:
            other = way._replace(schedule=schedule, chunks=chunks)
            plan, time = self._time(shape, other)
            if time.step_s - (0.0 if way.zero else time.data_s) <= self._worth_s(shape):
                self._try_syncs(self._fitting(shape, plan, time), other)

    def _try_syncs(self, candidate: Candidate | None, way: Way) -> None:
        if candidate is None:
            return
        self._take(candidate)
        shape, without_s = candidate.shape, candidate.step_s - candidate.time.data_s
        for sync in self.space.syncs(shape, zero=way.zero, lossy=True)[1:]:
            inexact = is_lossy(sync)
            if not inexact and not self.lossy:
                continue  # a server: exact, and not run yet
            worth_s = self._worth_s(shape)
            if inexact and not self.lossy:
                worth_s = min(worth_s, self.best_lossy.step_s if self.best_lossy else math.inf)
            if without_s <= worth_s:
                plan, time = self._time(shape, way, sync)
                if time.step_s <= worth_s and (other := self._fitting(shape, plan, time)) is not None:
                    self._take(other, inexact=inexact)

    def _time(self, shape: Shape, way: Way, sync: Sync | None = None) -> tuple[Plan, StepTime]:
        self.looked_at += 1
        plan = self.space.plan(shape, way, sync)
        return plan, step_time(self.space.profile, plan, self.space.machine, batch_size=self.space.batch_size)

    def _fitting(self, shape: Shape, plan: Plan, time: StepTime) -> Candidate | None:
        """Return the plan with its cost, or None where it does not fit into memory."""
        samples = -(-self.space.batch_size // shape.data)
        worst = peak(self.space.profile, plan, samples=samples, device=self.space.machine.device)
        if needed_bytes(worst, self.space.machine.device) > self._room_bytes(shape):
            return None
        return Candidate(shape=shape, plan=plan, time=time, peak=worst)

    def _room_bytes(self, shape: Shape) -> float:
        return room_bytes(self.space.machine, shape.workers) or math.inf

    def _least_bytes(self, shape: Shape, way: Way) -> float:
        """Return what a worker holds at least: its even share of parameters, gradients and optimizer state."""
        parameter_bytes, gradient_bytes, optimizer_bytes = self.state_bytes
        held = (parameter_bytes + gradient_bytes + optimizer_bytes) / way.shard
        on_fsdp2 = shape.data > 1 and (way.zero > 0 or shape.workers > shape.data)
        if on_fsdp2 and (way.zero < 3 or shape.pipeline > 1):  # all parameters lie there whole, beside the shards
            stays = shape.pipeline > 1 or (way.zero < 2 and way.micro_batch * shape.data < self.space.batch_size)
            whole = parameter_bytes + (gradient_bytes if stays else 0)
            held = max(held, whole + (parameter_bytes + optimizer_bytes) / way.shard)
        return held / (shape.tensor * shape.pipeline)

    def _worth_s(self, shape: Shape) -> float:
        """Return the step time above which a plan of `shape` is of no use."""
        own = self.best.get(shape)
        return min(self.limit_s, own.step_s * _TIE) if own else self.limit_s

    def _take(self, candidate: Candidate, *, inexact: bool = False) -> None:
        """Keep `candidate` if it is the best of its shape, or the best of those that are not exact."""
        if inexact and (self.best_lossy is None or candidate.rank < self.best_lossy.rank):
            self.best_lossy = candidate
        own = self.best.get(candidate.shape)
        if (inexact and not self.lossy) or (own is not None and own.rank <= candidate.rank):
            return
        self.best[candidate.shape] = candidate
        fastest = heapq.nsmallest(self.keep, (found.step_s for found in self.best.values()))
        self.limit_s = fastest[-1] * _TIE if len(fastest) == self.keep else math.inf


def _complexity(plan: Plan) -> int:
    """Return how much a plan asks for beyond plain data parallelism."""
    special = (plan.schedule != "1f1b") + (plan.sync.mode != "all-reduce") + (plan.sync.codec != "none")
    return RECOMPUTE.index(plan.recompute) + plan.zero + plan.chunks + special


def is_lossy(sync: Sync) -> bool:
    """Return whether gradients that meet so are not exactly those of the global batch."""
    return sync.codec != "none" or sync.mode == "local"

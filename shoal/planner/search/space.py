"""What the search looks at: every plan is a shape and a way to run it.

A shape says how many workers stand along tensor, pipeline and data. The ways to run a shape are its micro-batches,
what is recomputed, what is sharded over how many, the pipeline's schedule, and how the gradients meet.

Left out is what cannot win: gpipe takes as long as 1f1b and holds more; a pipeline whose longest stage is as long as
that of a shorter one, by cost and by count, only adds workers; a tensor group that neither divides a node nor fills
whole ones lies across two of them; shards over anything but all data workers, or those of one node. And what cannot be
run: batch norms with micro-batches. Ways to synchronise other than all-reduce are looked at where they are asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from shoal.planner.machine import Machine
from shoal.planner.search.validate import divisors, takes
from shoal.planner.stages import longest_piece, most_pieces
from shoal.spec.plan import RECOMPUTE, Batch, Mesh, Plan
from shoal.spec.profile import Profile
from shoal.spec.sync import Sync

LOSSY_CODECS = ("bf16", "int8", "topk", "powersgd")
LOCAL_STEPS = (4, 16)


class Shape(NamedTuple):
    """How many workers stand along each axis; `data` is cut into replicas and shards later."""

    tensor: int
    pipeline: int
    data: int

    @property
    def workers(self) -> int:
        """How many workers it has."""
        return self.tensor * self.pipeline * self.data


class Way(NamedTuple):
    """How a shape is run, but for how its gradients meet."""

    micro_batch: int
    recompute: str
    zero: int = 0
    shard: int = 1
    schedule: str = "1f1b"
    chunks: int = 1


@dataclass(frozen=True, kw_only=True)
class Space:
    """All plans for a model of `profile` in global batches of `batch_size` on `machine`."""

    profile: Profile
    machine: Machine
    batch_size: int

    def degrees(self) -> Iterator[tuple[int, int]]:
        """Yield every (tensor, pipeline) that the model can be cut into and the machine has workers for."""
        for tensor in self._tensors():
            for pipeline in self._pipelines():
                if tensor * pipeline <= self.machine.workers:
                    yield tensor, pipeline

    def datas(self, tensor: int, pipeline: int) -> list[int]:
        """Return how many parts a global batch may be cut into, the most first."""
        room = min(self.machine.workers // (tensor * pipeline), self.batch_size)
        even = {data for data in divisors(self.batch_size) if data <= room}
        if pipeline == 1:
            even.add(room)  # parts may differ by a sample; all replicas of a pipeline take equally many
        return sorted((data for data in even if self.micro_batches(Shape(tensor, pipeline, data))), reverse=True)

    def micro_batches(self, shape: Shape) -> list[int]:
        """Return the micro-batches to try, the largest first: for a pipeline, those that leave enough of them."""
        part = -(-self.batch_size // shape.data)
        if self.profile.batch_norms:
            return [part]
        sizes = set(divisors(part))
        if shape.pipeline > 1:
            sizes = {size for size in sizes if takes("1f1b", part // size, shape.pipeline)}
        else:
            sizes |= {2**power for power in range(part.bit_length())}
        return sorted(sizes, reverse=True)

    @property
    def recomputes(self) -> tuple[str, ...]:
        """What may be computed again: blocks are."""
        return RECOMPUTE if any(layer.block for layer in self.profile.layers) else ("none",)

    def shardings(self, shape: Shape) -> list[tuple[int, int]]:
        """Return (zero, shard): nothing sharded, or over all data workers, or over those of a node."""
        over = {shape.data}
        here = self.machine.per_node // shape.tensor
        over |= {max((size for size in divisors(shape.data) if size <= here), default=1)}
        stages = (1, 2, 3) if shape.pipeline == 1 else (1,)  # a pipeline runs all three alike
        return [(0, 1), *((zero, shard) for zero in stages for shard in sorted(over) if shard > 1)]

    def schedules(self, shape: Shape, micro_batch: int) -> list[tuple[str, int]]:
        """Return (schedule, chunks), 1f1b first."""
        found = [("1f1b", 1)]
        if shape.pipeline > 1:
            found.append(("zero-bubble", 1))
            count = self.batch_size // shape.data // micro_batch
            if takes("interleaved", count, shape.pipeline):
                found += [("interleaved", chunks) for chunks in self._chunks(shape.pipeline)]
        return found

    def least_bubble(self, pipeline: int) -> float:
        """Return the part of 1f1b's bubble that the best schedule leaves at least."""
        # Interleaving divides it by its chunks; zero-bubble leaves what is not backward, a third as a rule.
        return min(0.1, 1 / max(self._chunks(pipeline), default=1))

    def syncs(self, shape: Shape, *, zero: int, lossy: bool) -> list[Sync]:
        """Return the ways in which the gradients of a shape can meet, all-reduce first.

        `lossy` adds servers, and the inexact.
        """
        found = [Sync()]
        if not lossy or zero or shape.data == 1 or shape.workers != shape.data:
            return found
        servers = sorted({1, self.machine.nodes, shape.data})
        found += [Sync(mode="server", servers=count) for count in servers if count <= shape.data]
        found += [Sync(codec=codec) for codec in LOSSY_CODECS]
        return found + [Sync(mode="local", local_steps=steps) for steps in LOCAL_STEPS]

    def plan(self, shape: Shape, way: Way, sync: Sync | None = None) -> Plan:
        """Return the plan of a shape and a way to run it."""
        return Plan(
            mesh=Mesh(pipeline=shape.pipeline, replicate=shape.data // way.shard, shard=way.shard, tensor=shape.tensor),
            batch=Batch(micro_batch=way.micro_batch),
            precision=self.profile.precision,
            zero=way.zero,
            recompute=way.recompute,
            schedule=way.schedule,
            chunks=way.chunks,
            sync=sync or Sync(),
        )

    def shapes(self) -> Iterator[Shape]:
        """Yield every shape."""
        for tensor, pipeline in self.degrees():
            yield from (Shape(tensor, pipeline, data) for data in self.datas(tensor, pipeline))

    def plans(self, shape: Shape, *, lossy: bool = False) -> Iterator[Plan]:
        """Yield every plan of a shape: what the search finds the best of without looking at each."""
        for micro_batch in self.micro_batches(shape):
            for recompute in self.recomputes:
                for zero, shard in self.shardings(shape):
                    for schedule, chunks in self.schedules(shape, micro_batch):
                        way = Way(micro_batch, recompute, zero, shard, schedule, chunks)
                        yield from (self.plan(shape, way, sync) for sync in self.syncs(shape, zero=zero, lossy=lossy))

    def _tensors(self) -> list[int]:
        profile, most, here = self.profile, self.machine.workers, self.machine.per_node
        if profile.total(lambda layer: layer.pairs) == 0:
            return [1]
        degrees = divisors(profile.heads) if profile.heads else [2**power for power in range(most.bit_length())]
        return [degree for degree in degrees if degree <= most and (here % degree == 0 or degree % here == 0)]

    def _pipelines(self) -> list[int]:
        if self.profile.batch_norms:  # they take the whole part of a batch at once
            return [1]
        blocks = most_pieces(self.profile)
        most = min(blocks, self.machine.workers)
        by_count = _where_shorter(lambda stages: -(-blocks // stages), most)
        return sorted(by_count | _where_shorter(lambda stages: longest_piece(self.profile, stages), most))

    def _chunks(self, pipeline: int) -> list[int]:
        pieces = most_pieces(self.profile)
        candidates = [2, 3, 4] if pieces % pipeline else divisors(pieces // pipeline)
        return [chunks for chunks in candidates if chunks > 1 and chunks * pipeline <= pieces]


def _where_shorter(length: Callable[[int], int], most: int) -> set[int]:
    """Return the numbers of stages, up to `most`, each of which makes the longest shorter than one stage less does."""
    found = {1}

    def look(low: int, high: int) -> None:
        """Look between two numbers of which the higher one makes it shorter; more stages never make it longer."""
        middle = (low + high) // 2
        if middle == low:
            found.add(high)
            return
        for first, last in ((low, middle), (middle, high)):
            if length(last) < length(first):
                look(first, last)

    if length(most) < length(1):
        look(1, most)
    return found

"""A worker's part of a global batch, cut into micro-batches as its plan's engines ask.

1. The part is cut into micro-batches, and each is weighed (samples, or what the job's `weight` counts).
2. Where workers meet in every forward (shards gather parameters, batch norm its statistics), all must have equally
   many: those with fewer take stand-ins, which are computed and count nothing.
3. A pipeline wants micro-batches of one size, as many as its schedule takes. A last, partial batch is cut finer for it,
   down to single samples, and filled up with stand-ins.

Example: 2 shards, micro-batches of 2, parts of 3 and 1 samples: worker 0 has pieces of 2 and 1, worker 1 one of 1 and
a stand-in.
"""

from dataclasses import dataclass
from typing import Any

import torch

from shoal.data.steps import Part
from shoal.planner.search.validate import divisors, takes
from shoal.spec.job import Job
from shoal.spec.parts import parts
from shoal.spec.plan import Plan
from shoal.training.batch import micro_batches, to_device, weigh


@dataclass(frozen=True)
class Piece:
    """A micro-batch: some samples of the part, and what they weigh. One that weighs nothing is only a stand-in."""

    batch: Any
    samples: tuple[int, ...]
    weight: float


class Cutter:
    """Cuts parts into pieces. `meets`: whether workers meet in every forward."""

    def __init__(self, job: Job, plan: Plan, *, device: torch.device, meets: bool) -> None:
        self._job, self._plan, self._device, self._meets = job, plan, device, meets
        self.shares = plan.shares
        """The fraction of a global batch that each replica takes: it may change from one step to the next."""

    def cut(self, part: Part, batch: Any) -> list[Piece]:
        """Return the pieces of `part`, whose samples are `batch`: at least one."""
        batch = to_device(batch, self._device)
        if self._plan.mesh.pipeline > 1:
            return self._for_pipeline(part, batch)
        pieces = self._pieces(part, batch, self._plan.batch.micro_batch)
        if self._meets:
            return _filled(pieces, self._most(part))
        return [piece for piece in pieces if piece.weight] or pieces[:1]

    def _pieces(self, part: Part, batch: Any, micro_batch: int | None) -> list[Piece]:
        if not part.samples:
            return [Piece(batch, (), 0.0)]
        pieces, first = [], 0
        for micro, count in micro_batches(batch, num_samples=len(part.samples), micro_batch=micro_batch):
            weight = weigh(self._job, micro, num_samples=count)
            pieces.append(Piece(micro, part.samples[first : first + count], weight))
            first += count
        return pieces

    def _most(self, part: Part) -> int:
        """Return how many pieces the worker with the most of them has."""
        largest = max(parts(part.batch_samples, self.shares))
        return -(-largest // (self._plan.batch.micro_batch or largest))

    def _for_pipeline(self, part: Part, batch: Any) -> list[Piece]:
        stages, samples = self._plan.mesh.pipeline, max(1, len(part.samples))
        usual = self._plan.batch.micro_batch or samples
        fitting = [size for size in divisors(samples) if size <= usual and self._takes(samples // size)]
        pieces = self._pieces(part, batch, max(fitting, default=1))
        count = next(count for count in range(len(pieces), len(pieces) + stages + 1) if self._takes(count))
        return _filled(pieces, count)

    def _takes(self, count: int) -> bool:
        return takes(self._plan.schedule, count, self._plan.mesh.pipeline)


def _filled(pieces: list[Piece], count: int) -> list[Piece]:
    stand_in = Piece(pieces[0].batch, pieces[0].samples, 0.0)
    return pieces + [stand_in] * (count - len(pieces))

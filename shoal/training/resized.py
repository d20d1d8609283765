"""A plan for fewer workers than it was made for, for as many again, or for more.

1. The tensor and pipeline axes stay as they are: together they hold one whole model, and less of it cannot train. Only
   where too few are left for that, and the plan says so (`on_loss.replan`), these axes shrink, the pipeline before the
   tensor axis, to the largest divisors that fit: each worker then holds so much more of the model.
2. Of the data axes, whole replicas go first; then the shard axis shrinks (ZeRO), until nothing is left to be sharded.
   With more workers there are more replicas; where shards leave no whole number of them, one shard axis has all.
3. Shares are equal, or those that the plan gives to the workers that are left, scaled to 1; one that was added takes as
   much as the others do in the mean.

The global batch, its order, seeds and schedule are the job's: they never change. Where the plan names a micro-batch, a
part that is larger now is accumulated in more of them.

Example: mesh replicate=2, shard=2 (ZeRO-3) on 4 workers. Of 3 workers that are left 3 go on as shard=3, of 2 as
shard=2, and one alone without any ZeRO; 6 are replicate=3, shard=2, and 5 shard=5. Mesh pipeline=2, tensor=2 on 4
workers: of 3 that are left, with `replan`, 2 go on as tensor=2.
"""

import dataclasses
import math
from collections.abc import Sequence

from shoal.spec.plan import Mesh, Plan


def fitting(plan: Plan, workers: int) -> int:
    """Return how many of `workers` can train under `plan`, resized; 0 where they hold no whole model."""
    whole = plan.mesh.tensor * plan.mesh.pipeline
    return workers // whole * whole


def fitting_at_last(plan: Plan, workers: int) -> int:
    """Return how many of `workers` can train under `plan` if its tensor and pipeline axes may shrink."""
    return fitting(_shrunk(plan, workers), workers)


def resized(plan: Plan, numbers: Sequence[int]) -> Plan:
    """Return `plan` for the workers of these `numbers`, in their order; as many as fit."""
    if list(numbers) == list(range(plan.workers)):
        return plan
    smaller = _shrunk(plan, len(numbers))
    mesh = _mesh(smaller.mesh, len(numbers) // (smaller.mesh.tensor * smaller.mesh.pipeline))
    batch = dataclasses.replace(plan.batch, shares=_shares(plan, mesh, numbers))
    return dataclasses.replace(smaller, mesh=mesh, batch=batch, zero=plan.zero if mesh.shard > 1 else 0)


def _shrunk(plan: Plan, workers: int) -> Plan:
    """Return `plan` with the largest tensor and pipeline axes that `workers` can hold: its own, if they suffice."""
    sizes = [(t, p) for t in _divisors(plan.mesh.tensor) for p in _divisors(plan.mesh.pipeline) if t * p <= workers]
    tensor, pipeline = max(sizes, key=lambda size: (size[0] * size[1], size[0]))
    if (tensor, pipeline) == (plan.mesh.tensor, plan.mesh.pipeline):
        return plan
    is_piped, joined = pipeline > 1, plan.mesh.pipeline // pipeline
    return dataclasses.replace(
        plan,
        mesh=dataclasses.replace(plan.mesh, tensor=tensor, pipeline=pipeline),
        sequence=plan.sequence and tensor > 1,
        stages=plan.stages[joined - 1 :: joined] if is_piped else (),  # so many pieces become one
        schedule=plan.schedule if is_piped else "1f1b",
        chunks=plan.chunks if is_piped else 1,
    )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _mesh(mesh: Mesh, data: int) -> Mesh:
    """Return the mesh with `data` parts of a batch."""
    if data % mesh.shard == 0:
        return dataclasses.replace(mesh, replicate=data // mesh.shard)
    return dataclasses.replace(mesh, replicate=1, shard=data)


def _shares(plan: Plan, mesh: Mesh, numbers: Sequence[int]) -> tuple[float, ...]:
    shares = plan.batch.shares
    if not shares:
        return ()
    # A worker's number is its part of the batch only where every part has one worker.
    parts = numbers if plan.mesh.data == plan.workers else range(mesh.data)
    known = [shares[part] for part in parts if part < len(shares)] or shares
    mean = math.fsum(known) / len(known)
    kept = [shares[part] if part < len(shares) else mean for part in parts]
    return tuple(share / math.fsum(kept) for share in kept)

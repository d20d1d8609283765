"""Whether a plan can go on with another number of workers than it was made for: what cannot is refused in a sentence.

Read off the plan and the numbers of its job alone: whoever asks may be anywhere, and imports no torch.
"""

import dataclasses

from shoal.core.errors import PlanError
from shoal.planner.search.validate import check_batch, check_sync, divisors, takes
from shoal.spec.parts import parts
from shoal.spec.plan import Plan
from shoal.spec.record import JobRecord
from shoal.training.resized import resized


def check_scaled(plan: Plan, workers: int, job: JobRecord, *, most: int) -> Plan:
    """Return `plan` for so many workers of `job`, while it is trained. Raises PlanError where it cannot go on so.

    `most`: how many workers the run has, or has had.
    """
    if not plan.goes_on:
        setting = f"engine={plan.engine!r}" if plan.engine != "torch" else "on_loss.go_on=false (--on-loss stop)"
        raise PlanError(
            f"{setting}: its workers cannot go on as others than they are. End the run, and go on with it: --resume, "
            f"with --workers {workers}."
        )
    if plan.sync.mode != "all-reduce":
        raise PlanError(
            f"sync.mode={plan.sync.mode!r}: only where workers meet by all-reduce can others join and leave a training "
            f"and it stays the same. End the run, and go on with it: --resume, with --workers {workers}."
        )
    _check_whole(plan, workers)
    scaled = resized(plan, range(workers))
    batch_size = min(job.batch_size, job.num_samples or job.batch_size)
    check_batch(_as_cut(scaled, batch_size), batch_size)
    check_sync(scaled)
    if workers < most and not plan.mesh.keeps_whole and plan.on_loss.snapshot == "never":
        raise PlanError(
            f"{workers} instead of up to {most} workers: those that end hold parts of the model, and keep no copy "
            "for the others (on_loss.snapshot='never'). End the run, and go on with it: --resume."
        )
    return scaled


def _check_whole(plan: Plan, workers: int) -> None:
    whole = plan.mesh.tensor * plan.mesh.pipeline
    if workers % whole == 0:
        return
    axes = " and ".join(f"{axis}={size}" for axis in ("pipeline", "tensor") if (size := getattr(plan.mesh, axis)) > 1)
    below = workers // whole * whole
    instead = f"{below} or {below + whole}" if below else str(whole)
    raise PlanError(
        f"{workers} worker{'s' * (workers > 1)} with {axes}: each copy of the model takes {whole}. Use {instead}."
    )


def _as_cut(plan: Plan, batch_size: int) -> Plan:
    """Return `plan` with the micro-batch that its workers take of their parts, which may be smaller than it says."""
    if plan.mesh.data > batch_size:
        return plan
    part, micro_batch = max(parts(batch_size, plan.shares)), plan.at_once(batch_size)
    if plan.mesh.pipeline > 1:
        sizes = [size for size in divisors(part) if takes(plan.schedule, part // size, plan.mesh.pipeline)]
        micro_batch = max((size for size in sizes if size <= micro_batch), default=micro_batch)
    return dataclasses.replace(plan, batch=dataclasses.replace(plan.batch, micro_batch=micro_batch))

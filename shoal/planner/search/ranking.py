"""The ranking of plans that `shoal plan` shows: the best, what each costs, and what else there is to say."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.core.errors import PlanError
from shoal.core.units import format_bytes, format_seconds
from shoal.planner.calibration.calibration import Calibration
from shoal.planner.machine import Machine, machine_of
from shoal.planner.memory.peak import needed_bytes, peak
from shoal.planner.search.ranked import Ranked, cost_plan, with_figures
from shoal.planner.search.reasons import why_others_lost
from shoal.planner.search.reliability import NODE_MTBF_S, Reliability, plan_checkpoints
from shoal.planner.search.search import Candidate, search
from shoal.planner.search.shares import Shared
from shoal.planner.search.space import Shape, Space, Way
from shoal.planner.search.uneven import is_uneven, share_out, with_shares
from shoal.planner.search.validate import axes, fits, room_bytes, validate
from shoal.planner.search.why import Timed, why_chosen
from shoal.planner.time.refine import refine
from shoal.planner.time.steptime import StepTime, step_time
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan
from shoal.spec.profile import Profile

UNCALIBRATED_ERROR = 0.2
"""How far a step time may be off that rests on the catalog alone: it was 17% in the mean on public runs of 64 to 512
A100s (docs/accuracy.md)."""
STORAGE_BYTES_PER_S = 1e9
"""What a node writes of a checkpoint in a second, where no storage was measured: an assumption."""
_MORE = 3
"""How many more than the asked for are refined: the simulation may change their order."""


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The best plans, the fastest first."""

    plans: tuple[Ranked, ...]
    profile: Profile
    machine: Machine
    batch_size: int
    error: float
    """How far a step time may be off, as a fraction."""
    error_source: str
    reliability: Reliability
    lost: tuple[str, ...]
    """Why the obvious others lost."""
    notes: tuple[str, ...]
    """What else there is to say."""
    looked_at: int

    @property
    def room_bytes(self) -> int | None:
        """What a worker of the best plan has of memory."""
        return room_bytes(self.machine, self.plans[0].plan.workers)

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        machine = self.machine
        return {
            "plans": [ranked.as_json() for ranked in self.plans],
            "machine": {
                "device": machine.device.title,
                "nodes": machine.nodes,
                "per_node": machine.per_node,
                "memory_bytes": machine.device.memory_bytes,
                "inside_bytes_per_s": machine.inside.bytes_per_s,
                "between_bytes_per_s": machine.between.bytes_per_s,
                "adapters": machine.adapters,
            },
            "batch_size": self.batch_size,
            "error": {"step": self.error, "source": self.error_source},
            "checkpoints": dataclasses.asdict(self.reliability),
            "lost": list(self.lost),
            "notes": list(self.notes),
            "looked_at": self.looked_at,
        }


def rank_plans(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    machine: Machine | None = None,
    calibration: Calibration | None = None,
    keep: int = 5,
    lossy: bool = False,
    node_mtbf_s: float = NODE_MTBF_S,
) -> Ranking:
    """Return the `keep` best plans for a model of `profile` on `cluster`; `machine` is the same with all looked up."""
    machine = machine or machine_of(cluster)
    found = search(profile, machine, batch_size=batch_size, keep=keep + _MORE, lossy=lossy)
    if not found.best:
        raise _nothing_fits(Space(profile=profile, machine=machine, batch_size=batch_size))
    costed = [_cost(candidate, profile, cluster, machine, batch_size) for candidate in found.best]
    costed.sort(key=lambda each: each.time.step_s)
    best = costed[0]
    reliability = _reliability(profile, cluster, machine, best.plan.workers, node_mtbf_s)
    error, error_source = _error(calibration)
    space = Space(profile=profile, machine=machine, batch_size=batch_size)

    def timed(plan: Plan) -> StepTime:
        time = step_time(profile, plan, machine, batch_size=batch_size)
        out = share_out(plan, profile, cluster, machine, batch_size=batch_size)
        return time if out is None else with_shares(time, out[1])

    lost = tuple(why_others_lost(space, best.candidate, timed=timed))
    timed_plans = [Timed(each.plan, each.time) for each in costed]
    whys = [why_chosen(timed_plans, i, looked_at=found.looked_at, lost=lost) for i in range(len(costed))]
    return Ranking(
        plans=tuple(
            _ranked(each, profile, machine, batch_size, reliability, why=why)
            for each, why in zip(costed[:keep], whys, strict=False)
        ),
        profile=profile,
        machine=machine,
        batch_size=batch_size,
        error=error,
        error_source=error_source,
        reliability=reliability,
        lost=lost,
        notes=tuple(_notes(best, found.lossy, cluster, machine, lossy=lossy)),
        looked_at=found.looked_at,
    )


def check_plan(
    plan: Plan,
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    num_samples: int,
    machine: Machine | None = None,
    calibration: Calibration | None = None,
    node_mtbf_s: float = NODE_MTBF_S,
) -> Ranking:
    """Return the ranking of `plan` alone, with its own predictions; raise PlanError where it cannot run."""
    machine = machine or machine_of(cluster)
    validate(plan, profile, machine, batch_size=batch_size, num_samples=num_samples)
    full_batch = min(batch_size, num_samples)
    error, error_source = _error(calibration)
    return Ranking(
        plans=(cost_plan(plan, profile, machine, batch_size=full_batch),),
        profile=profile,
        machine=machine,
        batch_size=full_batch,
        error=error,
        error_source=error_source,
        reliability=_reliability(profile, cluster, machine, plan.workers, node_mtbf_s),
        lost=(),
        notes=(),
        looked_at=1,
    )


@dataclass(frozen=True, kw_only=True)
class _Costed:
    """A candidate after its simulation, with the shares of unequal devices."""

    candidate: Candidate
    plan: Plan
    time: StepTime
    shared: Shared | None = None


def _cost(candidate: Candidate, profile: Profile, cluster: Cluster, machine: Machine, batch_size: int) -> _Costed:
    time = refine(profile, candidate.plan, machine, batch_size=batch_size)
    out = share_out(candidate.plan, profile, cluster, machine, batch_size=batch_size)
    if out is None or not fits(out[0], profile, machine, batch_size=batch_size):
        return _Costed(candidate=candidate, plan=candidate.plan, time=time)
    plan, shared = out
    return _Costed(candidate=candidate, plan=plan, time=with_shares(time, shared), shared=shared)


def _ranked(
    costed: _Costed,
    profile: Profile,
    machine: Machine,
    batch_size: int,
    reliability: Reliability,
    *,
    why: tuple[str, ...],
) -> Ranked:
    plan = dataclasses.replace(costed.plan, checkpoint_s=float(max(1, round(reliability.interval_s))), why=why)
    return with_figures(plan, costed.time, profile, machine, batch_size)


def _reliability(profile: Profile, cluster: Cluster, machine: Machine, workers: int, node_mtbf_s: float) -> Reliability:
    nodes = -(-workers // machine.per_node)
    rate = cluster.storage[0].read_bytes_per_s if cluster.storage else STORAGE_BYTES_PER_S
    stall_s = (profile.parameter_bytes + profile.optimizer_bytes) / (rate * nodes)
    return plan_checkpoints(nodes=nodes, stall_s=stall_s, node_mtbf_s=node_mtbf_s)


def _error(calibration: Calibration | None) -> tuple[float, str]:
    if calibration is None or calibration.mean_abs_error is None:
        return UNCALIBRATED_ERROR, "not calibrated: shoal plan --calibrate fits it to measured runs"
    return (
        calibration.mean_abs_error,
        f"the mean held-out error of the calibration on {calibration.rows} measured steps",
    )


def _notes(
    best: _Costed, inexact: Candidate | None, cluster: Cluster, machine: Machine, *, lossy: bool
) -> Iterator[str]:
    workers = best.plan.workers
    if workers < machine.workers:
        yield f"The best plan takes {workers} of {machine.workers} devices: more would not make a step faster."
    if machine.nearby is not None:
        yield (
            "Plans are in the order of the arithmetic; their times include what was measured near each, which says "
            "how long to expect, and little about which is faster."
        )
    if best.shared is not None:
        parts = ", ".join(f"{part}" for part in sorted(set(best.shared.parts), reverse=True))
        yield (
            f"The devices differ: parts of {parts} samples, so that all are done together, are "
            f"{best.shared.gain:.2f}x as fast as equal parts."
        )
    elif is_uneven(cluster):
        yield "The devices differ, and all count as the slowest of them: a pipeline takes equal parts."
    if inexact is not None and not lossy and inexact.step_s < best.time.step_s:
        sync = inexact.plan.sync
        what = f"sync.local_steps={sync.local_steps}" if sync.mode == "local" else f"sync.codec={sync.codec!r}"
        yield (
            f"Not exact, so not proposed: {what} on {axes(inexact.plan.mesh)} would take "
            f"{format_seconds(inexact.step_s)} a step, {best.time.step_s / inexact.step_s:.2f}x as fast. "
            "--allow-lossy proposes such plans."
        )


def _nothing_fits(space: Space) -> PlanError:
    """Return the error for a model that no plan fits, with the least that a worker would need."""
    machine = space.machine
    least: tuple[int, Plan] | None = None
    for tensor, pipeline in space.degrees():
        for data in space.datas(tensor, pipeline)[:1]:
            shape = Shape(tensor, pipeline, data)
            way = Way(min(space.micro_batches(shape)), "full", *(space.shardings(shape)[-1]))
            plan = space.plan(shape, way)
            samples = -(-space.batch_size // data)
            asked = needed_bytes(peak(space.profile, plan, samples=samples, device=machine.device), machine.device)
            if least is None or asked < least[0]:
                least = asked, plan
    assert least is not None, "one worker is always a plan"
    room = room_bytes(machine, least[1].workers) or 0
    return PlanError(
        f"no plan fits: a worker needs at least {format_bytes(least[0])} (mesh {axes(least[1].mesh)}, full recompute), "
        f"and has {format_bytes(room)}. Use more or larger devices, or a smaller model."
    )

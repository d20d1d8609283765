"""Local steps by the link that there is: the job is traced, the cluster looked up, the rest is the planner's."""

import dataclasses
from pathlib import Path

from shoal.core.errors import PlanError
from shoal.planner.collectives.codecs import codec_of
from shoal.planner.sync.local import choose_local_steps
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.host import Say, measured_host, probed_host
from shoal.training.predict import predict_plan
from shoal.training.resolve import resolve_plan


def with_local_steps(job: Job, plan: Plan, *, cluster: Path | None, say: Say) -> Plan:
    """Return `plan` with as many local steps as the link between its workers asks for, which `say` is told.

    The link is that between hosts, where the cluster's file has one, or else that inside this host.
    """
    host = probed_host(cluster, say=say) or measured_host()
    plan = dataclasses.replace(plan, sync=dataclasses.replace(plan.sync, local_steps=1))
    resolved, profile = resolve_plan(job, plan, gpu=host.nodes[0].devices > 0, say=say)
    predicted = predict_plan(job, resolved, profile, cluster=host, say=say)
    link = host.between or host.inside
    if profile is None or predicted is None or link is None:
        raise PlanError("--local-steps auto: nobody knows what a step takes here. Give a number, as --local-steps 50.")
    chosen = choose_local_steps(
        num_bytes=codec_of(plan.sync.codec).ratio * profile.total(lambda layer: layer.parameter_bytes),
        workers=plan.workers,
        link=link,
        compute_s=predicted.step_s - predicted.comm_s,
    )
    say(f"{chosen.reason()} ({link.source}).")
    return dataclasses.replace(plan, sync=dataclasses.replace(plan.sync, local_steps=chosen.steps))

"""A plan held against its job before any process starts: what cannot run is refused here, in one sentence.

1. What needs no model: replicas against samples, ways to synchronise.
2. What needs its profile: heads against the tensor axis, layers against stages, batch norm against micro-batches.
3. Where a pipeline is cut: as the plan says, as the job says, or into pieces of equal cost; and whether the model's own
   forward can be cut there, and divided so, which is tried on fake tensors.
"""

import dataclasses
from pathlib import Path

from torch import nn

from shoal.comm.rank import read_rank
from shoal.core.errors import ConfigError, PlanError, ShoalError
from shoal.core.toml import read_toml
from shoal.parallel.apply import tensor_styles
from shoal.parallel.deepspeed.load import check_installed
from shoal.parallel.pipeline.rehearsal import find_blocks
from shoal.parallel.pipeline.split import split_model
from shoal.planner.search.validate import check_batch, check_model, check_sync
from shoal.planner.stages import piece_starts
from shoal.profile.sample import sample_batch
from shoal.profile.trace import build_fake, trace
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.profile import Profile
from shoal.training.host import Say


def resolve_plan(job: Job, plan: Plan, *, gpu: bool = False, say: Say = lambda _: None) -> tuple[Plan, Profile | None]:
    """Return `plan` with everything decided that it leaves open, and what the model costs; None if nobody can trace it.

    Raises PlanError for what cannot be run.
    """
    batch_size = job.largest_batch
    check_batch(plan, batch_size, num_samples=job.num_samples)
    check_sync(plan)
    if plan.engine == "deepspeed":
        check_installed()
    profile = _profile(job, plan, batch_size, gpu=gpu, say=say)
    if profile is not None:
        check_model(plan, profile)
        check_batch(plan, batch_size, num_samples=job.num_samples, profile=profile)
    if plan.mesh.pipeline > 1 or plan.mesh.tensor > 1:
        model = build_fake(job)
        if plan.mesh.tensor > 1:
            tensor_styles(job, plan, model)
        if plan.mesh.pipeline > 1:
            plan = _with_stages(job, plan, profile, model)
            batch = sample_batch(job, plan.at_once(batch_size))
            split_model(lambda each, some: call_model(each, job, some), model, batch, boundaries=plan.stages)
    return plan, profile


def asked_plan(plan: Plan | str | Path | None, workers: int | None) -> Plan:
    """Return the plan that was asked for: itself, from a file, or plain data parallelism over the workers."""
    if plan is not None and plan != "auto":
        if workers is not None:
            raise ConfigError(f"workers={workers} beside a plan, which has its own number. Give one of the two.")
        return plan if isinstance(plan, Plan) else read_toml(Plan, Path(plan))
    rank = read_rank()
    why = f"Given as workers={workers}." if workers else "No plan was given: plain data parallelism over all workers."
    return Plan(mesh=Mesh(replicate=workers or (rank.workers if rank else 1)), why=(why,))


def one_process(plan: Plan, profile: Profile | None) -> Plan:
    """Return the plan of one process that trains what `plan` trains: in its precision, with its micro-batches.

    Without these where batch norm must see the whole batch.
    """
    micro_batch = None if profile is not None and profile.batch_norms else plan.batch.micro_batch
    return Plan(batch=Batch(micro_batch=micro_batch), precision=plan.precision, timeout_s=plan.timeout_s)


def _profile(job: Job, plan: Plan, batch_size: int, *, gpu: bool, say: Say) -> Profile | None:
    try:
        return trace(job, micro_batch=plan.at_once(batch_size), precision=plan.precision, gpu=gpu)
    except ShoalError as error:
        say(f"No prediction: {error}")
        return None


def _with_stages(job: Job, plan: Plan, profile: Profile | None, model: nn.Module) -> Plan:
    if plan.stages:
        return plan
    if job.stages is not None:
        if len(job.stages) != plan.pieces - 1:
            raise PlanError(
                f"Job.stages names {len(job.stages)} modules for the {plan.pieces} pieces of pipeline="
                f"{plan.mesh.pipeline}, chunks={plan.chunks}. Name {plan.pieces - 1}, or set stages in the plan."
            )
        return dataclasses.replace(plan, stages=tuple(job.stages))
    blocks = find_blocks(model)
    if profile is None:
        raise PlanError(
            f"pipeline={plan.mesh.pipeline}: the model cannot be traced, so nobody knows where to cut it. "
            f"Write Job(stages=[...]) with {plan.pieces - 1} module names, such as {blocks[len(blocks) // 2 :][:1]}."
        )
    return dataclasses.replace(plan, stages=piece_starts(profile, plan.pieces))

"""The loader of one worker of a run."""

import torch

from shoal.data.steps import StepLoader
from shoal.spec.job import Job
from shoal.spec.plan import Plan


def open_loader(job: Job, plan: Plan, *, index: int, first_step: int, device: torch.device) -> StepLoader:
    """Return what loads part `index` of each global batch, from `first_step` to the end of the job."""
    return StepLoader(
        job.data,
        batch_size=job.batch_size,
        shares=plan.shares,
        index=index,
        first_step=first_step,
        last_step=job.total_steps,
        seed=job.seed,
        shuffle=job.shuffle,
        block_rows=job.block_rows,
        collate=job.collate,
        device=device,
        timeout_s=plan.timeout_s,
        is_ahead=device.type == "cuda",
    )

"""Evaluation: the weighted mean of the loss and of the job's metrics over a dataset, by all workers together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.comm.group import all_reduce_sum
from shoal.data.loader import Loader
from shoal.parallel.precision import precision_context
from shoal.spec.call import call_model
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from shoal.training.batch import micro_batches, to_device, weigh


def evaluate(model: nn.Module, job: Job, plan: Plan, *, rank: int, device: torch.device) -> dict[str, float]:
    """Return {"loss": ..., metric: ...} over `job.eval_data`, the same on every worker. Called by every worker."""
    names = ["loss", *job.metrics]
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)
    with _eval_mode(model), torch.no_grad():
        for batch, weight in _weighed_batches(job, plan, rank=rank, device=device):
            with precision_context(plan.precision, device):
                output = call_model(model, job, batch)
                values = [float(function(output, batch)) for function in (job.loss, *job.metrics.values())]
            sums += weight * torch.tensor([*values, 1.0], dtype=torch.float64)
    if plan.workers > 1:
        all_reduce_sum(sums).wait()
    return dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))


def _weighed_batches(job: Job, plan: Plan, *, rank: int, device: torch.device) -> Iterator[tuple[Any, float]]:
    loader = Loader(
        job.eval_data,
        batch_size=job.batch_size,
        shares=plan.shares,
        index=rank,
        last_step=-(-len(job.eval_data) // job.batch_size),
        shuffle=False,
        collate=job.collate,
        timeout_s=plan.timeout_s,
    )
    for part in loader:
        if part.batch is None:
            continue
        whole = to_device(part.batch, device)
        for batch, count in micro_batches(whole, num_samples=len(part.samples), micro_batch=plan.batch.micro_batch):
            weight = weigh(job, batch, num_samples=count)
            if weight:
                yield batch, weight


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the whole model into evaluation mode, and each module back into its own afterwards."""
    modes: Sequence[tuple[nn.Module, bool]] = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training

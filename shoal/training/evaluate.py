"""Evaluation: the weighted mean of the loss and of the job's metrics over a dataset, by all workers together."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from shoal.comm.group import all_reduce_sum
from shoal.comm.mesh import Position
from shoal.data.loading.patience import Check, never
from shoal.data.steps import StepLoader
from shoal.data.stream_steps import StreamLoader
from shoal.spec.job import Job, is_stream
from shoal.spec.plan import Plan
from shoal.training.pieces import Cutter, Piece
from shoal.training.step import Engine


def evaluate(
    model: nn.Module,
    job: Job,
    plan: Plan,
    engine: Engine,
    *,
    position: Position,
    cutter: Cutter,
    check: Check = never,
) -> dict[str, float]:
    """Return {"loss": ..., metric: ...} over `job.eval_data`, the same on every worker. Called by every worker.

    Replicas meet only at the end of it, which may be minutes away: `check`, which raises if a worker is lost, is called
    between micro-batches and while samples are waited for.
    """
    names = ["loss", *job.metrics]
    functions = (job.loss, *job.metrics.values())
    sums = torch.zeros(len(names) + 1, dtype=torch.float64)

    def score(output: Any, piece: Piece) -> torch.Tensor:
        check()
        if not piece.weight:
            return torch.zeros(len(names) + 1, dtype=torch.float64)
        values = [float(function(output, piece.batch)) for function in functions]
        return piece.weight * torch.tensor([*values, 1.0], dtype=torch.float64)

    with _eval_mode(model), torch.no_grad():
        for part in _parts(job, plan, position=position, check=check):
            for scored in engine.forward(cutter.cut(part, part.batch), score):
                sums += scored.to(sums)
    if plan.workers > 1:
        sums /= plan.mesh.tensor  # workers of one tensor group have all counted the same
        all_reduce_sum(sums).wait()
    return dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))


def _parts(job: Job, plan: Plan, *, position: Position, check: Check) -> StepLoader:
    collate = job.eval_collate or job.collate
    if is_stream(job.eval_data):
        return StreamLoader(
            job.eval_data,
            batch_size=job.batch_size,
            shares=plan.shares,
            index=position.data,
            last_step=None,
            collate=collate,
            timeout_s=plan.timeout_s,
            check=check,
        )
    return StepLoader(
        job.eval_data,
        batch_size=job.batch_size,
        shares=plan.shares,
        index=position.data,
        last_step=-(-len(job.eval_data) // job.batch_size),
        shuffle=False,
        collate=collate,
        threads=plan.loading.threads or None,
        workers=plan.loading.workers,
        timeout_s=plan.timeout_s,
        check=check,
    )


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

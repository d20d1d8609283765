"""Jobs for tests of `shoal verify`: one that is not the same, and one that evaluates."""

import dataclasses
from typing import Any

import torch

from benchmarks.parallel_cases import gpt, vit
from shoal.spec.job import Job


def gpt_with_a_doubled_weight(steps: int) -> Job:
    """The GPT of the contract suite, but for one weight."""
    job = gpt(steps=steps)

    def model() -> Any:
        built = job.model()
        with torch.no_grad():
            built.blocks[1].feed_up.weight *= 2
        return built

    return dataclasses.replace(job, model=model)


def evaluated_vit(steps: int) -> Job:
    """The vision transformer, evaluated at the end on a few samples, of which the last batch is partial."""
    job = vit(steps=steps)
    accuracy = lambda out, batch: (out.argmax(-1) == batch["y"]).float().mean()  # noqa: E731
    subset = torch.utils.data.Subset(job.data, list(range(21)))
    return dataclasses.replace(job, eval_data=subset, metrics={"accuracy": accuracy})

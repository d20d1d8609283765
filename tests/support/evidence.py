"""What is known of a run, made up: the evidence that advice is given on."""

import dataclasses
from typing import Any

from shoal.report.advice import Advice
from shoal.report.advice.evidence import Busy, Evidence
from shoal.report.split import PARTS
from shoal.spec.plan import Mesh, Plan, Predicted


def busy(rank: int = 0, *, samples: float = 16, passes_s: float = 0.0, **parts_s: float) -> Busy:
    """Return a worker whose step has these parts; forward and backward are its computing."""
    split = dict.fromkeys(PARTS, 0.0) | {"compute": passes_s} | parts_s
    return Busy(rank=rank, samples=samples, total_s=sum(split.values()), split=split, passes_s=passes_s)


def evidence(*workers: Busy, plan: Plan | None = None, **fields: Any) -> Evidence:
    plan = plan or Plan(mesh=Mesh(replicate=len(workers)))
    samples = round(sum(worker.samples for worker in workers))
    return Evidence(**{"plan": plan, "batch_size": samples, "steps": 100, "workers": workers, "loading": {}, **fields})


def only(found: list[Advice]) -> Advice:
    assert len(found) == 1, [advice.sentence for advice in found]
    return found[0]


def predicted(*, fixed_s: float, sample_s: float) -> Predicted:
    cost = Predicted(step_s=1.0, comm_s=0.0, samples_per_s=1.0, peak_bytes=(1,))
    return dataclasses.replace(cost, fixed_s=fixed_s, sample_s=sample_s)

"""Which codec `sync.codec = "auto"` is in this run, if any: decided when its workers start, by what joins them.

1. A state that was trained with a codec goes on with it (`kept_codec`).
2. Of the codecs that go with the plan (planner/engine.py); where there are none, there is none to take.
3. Where gradients meet in the memory of one host, none: there is nothing to save.
4. Otherwise each is timed on this machine, and the one is taken, or none, with which the link gets to the same loss
   soonest (planner/collectives/choice.py). What a step computes is taken from the plan's prediction. Without one nobody
   can say what a shorter exchange is worth, so none is taken.
"""

import math
from collections.abc import Sequence

import torch

from shoal.comm.link import agree_least
from shoal.planner.collectives.allreduce import ring, ring_all_gather
from shoal.planner.collectives.choice import choose_codec
from shoal.planner.collectives.compression import Setting
from shoal.planner.engine import codecs_for, frees_parameters, why_no_codec
from shoal.spec.plan import Plan, Predicted
from shoal.training.codec_rates import measured_rates
from shoal.training.links import Place


def kept_codec(plan: Plan, place: Place) -> tuple[str, str]:
    """Return the codec of the state that is gone on from, and why; "" where it has none that goes with the plan."""
    # A single part sends nothing, but takes over what was pending, whatever its mesh.
    is_alone = plan.mesh.data == 1 and plan.sync.mode == "all-reduce" and plan.engine != "deepspeed"
    goes_on = bool(place.codec) if is_alone else place.codec in codecs_for(plan)
    is_kept = plan.sync.codec == "auto" and goes_on
    return (place.codec, "as before: what it has not sent yet is part of the state") if is_kept else ("", "")


def choose(
    plan: Plan,
    place: Place,
    *,
    shapes: Sequence[torch.Size],
    in_memory: bool,
    bucket_bytes: int,
    bucket_s: float | None,
) -> tuple[str, str]:
    """Return the codec that gradients of these `shapes` go through, or "none", and why. Called by every worker.

    `in_memory`: they meet in shared memory otherwise. Else a bucket takes `bucket_s`, where that is known.
    """
    names, predicted = codecs_for(plan), plan.predicted
    if not names:
        return "none", f"no codec goes with this plan: {why_no_codec(plan)}"
    if in_memory:
        return "none", "no codec pays here: gradients meet in the memory of one host, and travel nowhere"
    if predicted is None:
        why = "without a prediction of what a step computes nobody can say what a codec brings"
        return "none", f"{why}. To have one all the same, name it: sync.codec = 'int8'"
    setting = _setting(plan, place, predicted, num_bytes=sum(4 * shape.numel() for shape in shapes))
    choice = choose_codec(
        setting,
        measured_rates(names, place.device, agree_least),
        shapes=shapes,
        exchange_s=None if bucket_s is None else math.ceil(setting.num_bytes / bucket_bytes) * bucket_s,
    )
    return choice.name, choice.why


def _setting(plan: Plan, place: Place, predicted: Predicted, *, num_bytes: float) -> Setting:
    """Return where the question whether a codec pays is asked; computing as it was predicted."""
    link = place.link_of(plan.mesh)
    workers, compute_s = plan.mesh.data, max(0.0, predicted.step_s - predicted.comm_s)
    # Gradients travel while the rest of backward, half of the computing or so, goes on; parameters between steps.
    overlap_s = compute_s / 2 if link.overlaps and plan.sync.mode == "all-reduce" else 0.0
    if plan.zero:  # parameters are gathered as they are, whatever gradients go through
        gathers = 2 if frees_parameters(plan) else 1
        compute_s += gathers * ring_all_gather(num_bytes, workers, link.bytes_per_s, link.latency_s).seconds
    return Setting(
        num_bytes=num_bytes,
        workers=workers,
        link_bytes_per_s=link.bytes_per_s,
        latency_s=link.latency_s,
        compute_s=compute_s * plan.sync.local_steps,
        overlap_s=overlap_s,
        per_host=min(workers, max(1, place.per_host // plan.mesh.tensor)),
        scatters=plan.zero > 0,
        algorithms={"ring": ring},  # the engine's; what our own algorithms take is known by the bucket
    )

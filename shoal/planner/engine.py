"""Which of torch's engines runs a plan, as far as that decides what a worker holds and when it sends.

DDP takes whole models (mesh.replicate alone). FSDP2 takes the rest, with a shard axis of 1 where nothing is sharded. It
gathers parameters at a step's first forward and keeps them; what differs is what it frees again, and when gradients go
to their shards. A pipeline runs FSDP2 its own way: once a step, whatever the stage of ZeRO.

             parameters freed      gradients scattered
zero 0, 1    with the step         in the last micro-batch's backward
zero 2       with the step         in every backward
zero 3       after every forward   in every backward
a pipeline   with the step         after the last backward
"""

from shoal.spec.plan import Plan
from shoal.spec.sync import CODECS, WHOLE_CODECS


def on_ddp(plan: Plan) -> bool:
    """Return whether DDP joins the replicas."""
    return plan.mesh.data > 1 and plan.mesh.keeps_whole


def on_fsdp2(plan: Plan) -> bool:
    """Return whether FSDP2 joins the replicas and shards."""
    return plan.mesh.data > 1 and not on_ddp(plan)


def frees_parameters(plan: Plan) -> bool:
    """Return whether a block's parameters go after its forward, and come again for its backward."""
    return plan.zero == 3 and plan.mesh.pipeline == 1


def scatters_each(plan: Plan) -> bool:
    """Return whether gradients go to their shards in every micro-batch, so that none lie whole between two."""
    return plan.zero >= 2 and plan.mesh.pipeline == 1


def scatters_after(plan: Plan) -> bool:
    """Return whether gradients are sent only when all backwards are done, beside nothing."""
    return on_fsdp2(plan) and plan.mesh.pipeline > 1


def codecs_for(plan: Plan) -> tuple[str, ...]:
    """Return the codecs that gradients can go through under `plan`: what `codec = "auto"` is chosen from."""
    if why_no_codec(plan):
        return ()
    whole = () if plan.mesh.keeps_whole else WHOLE_CODECS
    return tuple(name for name in CODECS if name not in ("none", "auto", *whole))


def why_no_codec(plan: Plan) -> str:
    """Return why gradients can go through no codec under `plan`; "" where they can through some."""
    if plan.engine == "deepspeed":
        return "DeepSpeed sends gradients as they are"
    if plan.sync.mode not in ("all-reduce", "local"):
        return f"sync.mode={plan.sync.mode!r} sends gradients as they are"
    if plan.zero and plan.mesh.replicate > 1:
        return "beside shards, FSDP2 sums over the copies by itself, without an entry for a codec"
    if not plan.zero and not plan.mesh.keeps_whole:
        return "a codec takes whole models, or the shards of ZeRO"
    return ""

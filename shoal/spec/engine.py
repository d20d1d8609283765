"""Which engine runs a plan: torch's own (DDP, FSDP2, pipelining) or DeepSpeed's ZeRO; and what the latter cannot."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal.core.errors import PlanError, did_you_mean

if TYPE_CHECKING:
    from shoal.spec.plan import Plan

ENGINES = ("torch", "deepspeed")


def check_engine(plan: "Plan") -> None:
    """Raise PlanError where the engine of `plan` is none, or cannot do what the plan says."""
    if plan.engine not in ENGINES:
        raise PlanError(f"engine={plan.engine!r} is none.{did_you_mean(plan.engine, list(ENGINES))}")
    if plan.engine == "torch":
        if plan.offload:
            raise PlanError("offload=true with engine='torch', which keeps all on its device. Use engine='deepspeed'.")
        return
    for limit in _DEEPSPEED_LIMITS:
        sentence = limit(plan)
        if sentence is not None:
            raise PlanError(f"engine='deepspeed' with {sentence}")


def _zero(plan: "Plan") -> str | None:
    if plan.zero:
        return None
    return (
        "zero=0: DeepSpeed is here for ZeRO. Use zero=1, 2 or 3 with mesh.shard, or engine='torch' for plain data "
        "parallelism."
    )


def _mesh(plan: "Plan") -> str | None:
    mesh = plan.mesh
    for axis in ("tensor", "pipeline"):
        if (size := getattr(mesh, axis)) > 1:
            return (
                f"mesh.{axis}={size}: it shards here, and divides nothing else. Use mesh.{axis}=1, or engine='torch'."
            )
    if mesh.replicate > 1:
        return (
            f"mesh.replicate={mesh.replicate}: it shards over all workers here. Use mesh.shard={mesh.workers} with "
            "mesh.replicate=1, or engine='torch'."
        )
    return None


def _sync(plan: "Plan") -> str | None:
    sync = plan.sync
    if sync.mode != "all-reduce":
        return (
            f"sync.mode={sync.mode!r}: its workers meet in every step. Use sync.mode='all-reduce', or engine='torch'."
        )
    if sync.codec not in ("none", "auto"):
        return f"sync.codec={sync.codec!r}: it sends gradients as they are. Use sync.codec='none', or engine='torch'."
    if sync.way not in ("auto", "engine"):
        return f"sync.way={sync.way!r}: it has its own collectives. Use sync.way='engine', or engine='torch'."
    return None


def _compile(plan: "Plan") -> str | None:
    if not plan.compile:
        return None
    return "compile=true: its hooks around the layers are not compiled. Use compile=false, or engine='torch'."


def _snapshots(plan: "Plan") -> str | None:
    if not isinstance(plan.on_loss.snapshot_steps, int):
        return None
    return (
        f"on_loss.snapshot={plan.on_loss.snapshot!r}: its workers cannot go on without one that is lost. Leave it out "
        "and write checkpoints (checkpoint.every_steps), or use engine='torch'."
    )


_DEEPSPEED_LIMITS: tuple[Callable[["Plan"], str | None], ...] = (_zero, _mesh, _sync, _compile, _snapshots)
"""What DeepSpeed does not do here: each returns the rest of a sentence that refuses a plan, or None."""

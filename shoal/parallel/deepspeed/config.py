"""DeepSpeed's configuration for a plan: a pure function.

What is left to DeepSpeed: how state is sharded, when it travels, and clipping. What is not:
- Accumulation. A last, partial batch has fewer micro-batches than others; the engine is told which one is the last.
- The mean. DeepSpeed divides what it sums by the number of workers, so the loss, scaled by its weight in the global
  batch, is multiplied by that before.
- Precision. Parameters stay in float32, and autocast is entered around the model as without DeepSpeed: its own bf16
  would round the parameters.
- The optimizer is the job's own, over DeepSpeed's slices.
"""

from typing import Any

from shoal.spec.plan import Plan

_FLOAT32_BYTES = 4


def deepspeed_config(plan: Plan, *, micro_batch: int, clip_norm: float | None, gpu: bool = False) -> dict[str, Any]:
    """Return what `deepspeed.initialize` takes as `config`, for a job whose gradient is clipped to `clip_norm`."""
    zero: dict[str, Any] = {"stage": plan.zero}
    if plan.sync.bucket_bytes:
        zero["reduce_bucket_size"] = max(1, plan.sync.bucket_bytes // _FLOAT32_BYTES)
    if plan.offload:
        # Pinned memory is what a GPU copies from beside computing; for a processor it would be compiled first.
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": gpu}
    return {
        "train_micro_batch_size_per_gpu": micro_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": clip_norm or 0.0,
        "zero_optimization": zero,
        # Its own optimizers are compiled at first use, and train something a little different.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        "wall_clock_breakdown": False,
    }

"""What a plan costs: every worker's memory, and the step time of the slowest."""

import math
from collections.abc import Sequence

from shoal.planner.memory import peak_bytes
from shoal.planner.steptime import step_seconds
from shoal.spec.plan import Predicted
from shoal.spec.profile import Profile


def predict(
    profile: Profile,
    *,
    parts: Sequence[int],
    micro_batch: int | None,
    matmul_flops_per_s: float,
    memory_bytes_per_s: float,
    operation_s: float = 0.0,
    link_bytes_per_s: float = math.inf,
    link_latency_s: float = 0.0,
    link_overlaps: bool = False,
) -> Predicted:
    """Return the cost of a step whose global batch is cut into `parts`, one part (in samples) for each worker.

    All workers run on one host; `matmul_flops_per_s` (in the plan's precision) and `memory_bytes_per_s` are its rates.
    """
    compute_s, comm_s = step_seconds(
        profile,
        samples=max(parts),  # the slowest: the others wait for it in the all-reduce
        matmul_flops_per_s=matmul_flops_per_s,
        memory_bytes_per_s=memory_bytes_per_s,
        operation_s=operation_s,
        micro_batch=micro_batch,
        workers=len(parts),
        link_bytes_per_s=link_bytes_per_s,
        link_latency_s=link_latency_s,
        link_overlaps=link_overlaps,
    )
    step_s = compute_s + comm_s
    return Predicted(
        step_s=step_s,
        comm_s=comm_s,
        samples_per_s=sum(parts) / step_s,
        peak_bytes=tuple(peak_bytes(profile, samples=part, micro_batch=micro_batch) for part in parts),
    )

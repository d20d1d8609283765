"""Straggler: the others wait for a worker that takes longer for its samples.

1. What a sample takes on each worker is what it did with its own: data, forward and backward, divided by their number.
2. The samples of a batch are handed out so that all are done together (`spec.parts.hand_out`).
3. A step becomes shorter by what the slowest worker then has less to do. What else the others waited for stays: that in
   single steps one or another was late, as where workers share cores, is nothing that shares can change.

Example: 8 of 16 samples each, 2 and 8 ms for one: 64 ms. With 13 and 3 samples it is 26 ms, 2.5 times as many a second.
"""

from shoal.report.advice.advice import NOTICED, Advice, milliseconds, percent, times
from shoal.report.advice.evidence import Busy, Evidence
from shoal.spec.parts import hand_out


def on_straggler(run: Evidence) -> Advice | None:
    """Return shares by speed."""
    plan, workers = run.plan, run.workers
    slow, waiting = run.critical, max(workers, key=lambda worker: worker.share("waiting"))
    can_share = plan.mesh.data == plan.workers > 1 and plan.mesh.pipeline == 1 and plan.sync.mode == "all-reduce"
    if not can_share or waiting.share("waiting") < NOTICED or waiting is slow:
        return None
    each_s, fixed_s = [_sample_s(worker) for worker in workers], [_fixed_s(worker) for worker in workers]
    most = [_most(worker, run) for worker in workers]
    parts = hand_out(run.batch_size, sample_s=each_s, fixed_s=fixed_s, most=most)
    done_s = max(fix + part * each for fix, part, each in zip(fixed_s, parts, each_s, strict=True))
    change: dict[str, object] = {"batch.shares": tuple(part / run.batch_size for part in parts)}
    gain = run.gain(run.step_s - max(0.0, slow.busy_s - done_s))
    sentence = (
        f"Worker {waiting.rank} waits {percent(waiting.share('waiting'))} of each step for worker {slow.rank}, which "
        f"{_why(slow, run)}; shares by speed are predicted to bring {times(gain)}."
    )
    return Advice("straggler", waiting.share("waiting"), sentence, change, gain)


def _why(slow: Busy, run: Evidence) -> str:
    """Return what a worker that the others wait for does: it is slower than they are, or has more samples."""
    others = sorted(_sample_s(worker) for worker in run.workers if worker is not slow)
    usual_s = others[len(others) // 2]
    says = f"takes {milliseconds(_sample_s(slow))} for a sample, others {milliseconds(usual_s)}"
    if _sample_s(slow) > usual_s:
        return says
    return f"has {percent(slow.samples / run.batch_size)} of each batch and {says}"


def _sample_s(worker: Busy) -> float:
    return max((worker.split["data"] + worker.passes_s) / worker.samples, 1e-9)


def _fixed_s(worker: Busy) -> float:
    return max(0.0, worker.busy_s - worker.split["data"] - worker.passes_s)


def _most(worker: Busy, run: Evidence) -> int:
    """Return how many samples fit into memory, as if all that a worker holds grew with them."""
    if not worker.peak_bytes or run.plan.batch.micro_batch is not None:
        return run.batch_size
    return max(1, int(min(run.batch_size, worker.samples * run.memory_bytes / worker.peak_bytes)))

"""Checkpoint stall: training waits until a checkpoint is copied, and until the one before it is written.

1. The state is copied while training waits, and written while it goes on (fault/checkpoint/writer.py). What a stall is
   longer than a copy takes, it has waited for the checkpoint before.
2. Wanted is an interval in which one is written with room to spare, and copying takes at most 2% of the time; rounded
   up to 1, 2 or 5 times a power of ten.

Example: steps of 20 ms, a checkpoint after each, 400 ms to write, 5 ms to copy: a step takes 400 ms. With one in 50
steps it is 20.1 ms; a worker that is lost then costs 1 s of training.
"""

import math

from shoal.report.advice.advice import NOTICED, Advice, milliseconds, percent, times
from shoal.report.advice.evidence import Evidence

_SPARE = 1.5
_COPYING = 0.02
_COPY_BYTES_PER_S = 1e9
"""What copying the state reaches at least, on a processor or from a device (benchmarks/faults/checkpoint_stall.py)."""


def on_checkpoints(run: Evidence) -> Advice | None:
    """Return a longer interval."""
    saves = [save for save in run.saves if not save.error]
    worker = max(run.workers, key=lambda each: each.split["checkpoint"])
    share = worker.share("checkpoint")
    if not saves or share < NOTICED:
        return None
    stall_s = min(worker.split["checkpoint"], sum(save.stall_s for save in saves) / run.steps)
    copy_s = min(*(save.stall_s for save in saves), saves[-1].bytes / _COPY_BYTES_PER_S)
    write_s = sum(save.write_s for save in saves) / len(saves)
    step_s = run.step_s - stall_s
    if step_s <= 0:
        return None  # nothing is known of a step without the wait
    steps = _rounded(max(_SPARE * write_s, copy_s / _COPYING) / step_s)
    every = max(1, round(run.steps / len(saves)))
    if steps <= every:
        return None
    change: dict[str, object] = {"checkpoint.every_steps": steps}
    gain = run.gain(step_s + copy_s / steps)
    now = "each step" if every == 1 else f"{every} steps"
    sentence = (
        f"{percent(share)} of each step is spent waiting for checkpoints, which take {milliseconds(write_s)} to write; "
        f"one in {steps} steps instead of one in {now} is predicted to bring {times(gain)}."
    )
    return Advice("checkpoint", share, sentence, change, gain)


def _rounded(steps: float) -> int:
    """Return the least of 1, 2, 5, 10, 20, ... that is not less."""
    unit = int(10 ** math.floor(math.log10(max(steps, 1.0))))
    return next(nice * unit for nice in (1, 2, 5, 10) if nice * unit >= steps - 1e-9)

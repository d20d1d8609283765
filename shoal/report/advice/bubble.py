"""Pipeline bubble: stages wait until the first micro-batch has come through, and the last has.

1. While a stage waits, one micro-batch goes through all the others: the bubble is as long as they take for it, and
   shrinks with its size. At the end of a step the stages that are done wait for the others in a sum: that is the
   bubble, too.
2. What a stage waits beyond that is what handing a micro-batch on costs: as much for each of them, whatever its size.
3. A micro-batch of b samples takes fixed + b * each (micro_batch.py); without a prediction, fixed is 0.
4. Of the sizes that divide a worker's samples, the largest is taken that is within 5% of the best. Where they are as
   small as can be, the zero-bubble schedule fills the waits with the gradients of weights, half of a backward: of the
   bubble the forward's part stays, about a third.

Example: 4 stages, 4 micro-batches of 8 samples, 20 ms each: 80 + 60 ms, and 144 are measured: 1 ms to hand one on. With
16 of 2 samples it is 80 + 15 + 16 ms, 1.3 times as many a second.
"""

from shoal.report.advice.advice import NOTICED, Advice, percent, times
from shoal.report.advice.evidence import Evidence
from shoal.report.advice.micro_batch import ENOUGH, Passes, passes_of

_FORWARD = 1 / 3
"""The forward's part of a forward and a backward, which computes twice as many products."""


def on_bubble(run: Evidence) -> Advice | None:
    """Return smaller micro-batches, or a schedule with less bubble."""
    plan, worker = run.plan, run.critical
    share = sum(each.idle_s / each.total_s for each in run.workers) / len(run.workers)
    if plan.mesh.pipeline == 1 or share < NOTICED or worker.passes_s <= 0:  # what computes nothing, nothing shortens
        return None
    samples = max(1, round(worker.samples))
    size = min(samples, plan.batch.micro_batch or samples)
    passes = passes_of(worker, run) or Passes(samples, size, 0.0, worker.passes_s / samples)
    bubble_s = min(_bubble_s(run, passes), worker.idle_s)
    hand_on_s = (worker.idle_s - bubble_s) / passes.count
    rest_s = run.step_s - worker.passes_s - worker.idle_s

    def gain_of(smaller: int) -> float:
        shrunk = (passes.fixed_s + smaller * passes.sample_s) / (passes.fixed_s + size * passes.sample_s)
        handing_s = samples / smaller * hand_on_s
        return run.gain(rest_s + passes.seconds(smaller) + shrunk * bubble_s + handing_s)

    gains = {each: gain_of(each) for each in range(1, size) if samples % each == 0}
    said = f"{percent(share)} of each step is pipeline bubble"
    if not gains:
        return _other_schedule(run, share, said)
    smaller = max(each for each, gain in gains.items() if gain >= ENOUGH * max(gains.values()))
    change: dict[str, object] = {"batch.micro_batch": smaller}
    counted = f"{passes.count} micro-batch{'es' * (passes.count > 1)} for {plan.mesh.pipeline} stages"
    sentence = f"{said}: {counted}; {samples // smaller} of {smaller} are predicted to bring {times(gains[smaller])}."
    return Advice("bubble", share, sentence, change, gains[smaller])


def _bubble_s(run: Evidence, passes: Passes) -> float:
    """Return how long one micro-batch takes on all stages but the critical one, as far as the schedule waits for it."""
    plan = run.plan
    a_stage = len(run.workers) / plan.mesh.pipeline
    others_s = sum(worker.passes_s for worker in run.workers) / a_stage - run.critical.passes_s
    kept = {"interleaved": 1 / plan.chunks, "zero-bubble": _FORWARD}.get(plan.schedule, 1.0)
    return kept * others_s / passes.count


def _other_schedule(run: Evidence, share: float, said: str) -> Advice | None:
    if run.plan.schedule not in ("1f1b", "gpipe"):
        return None
    gain = run.gain(run.step_s - (1 - _FORWARD) * run.critical.idle_s)
    change: dict[str, object] = {"schedule": "zero-bubble"}
    sentence = f"{said}; the zero-bubble schedule is predicted to bring {times(gain)}."
    return Advice("bubble", share, sentence, change, gain)

"""The verdict on a run: one sentence first, then what stands out."""

from collections.abc import Iterator

from shoal.core.events import STEP_PARTS
from shoal.report.advice import advise, failed_advisers
from shoal.report.advice.advice import percent
from shoal.report.summary import Summary

__all__ = ["OTHER", "PART_NAMES", "counted", "headline", "metric_in_words", "percent", "rate_in_words", "ratio_of"]
__all__ += ["remarks", "step_fractions", "verdict"]

_NAMES = ("data", "forward", "backward", "communication", "bubble", "optimizer", "checkpoint")
PART_NAMES = dict(zip(STEP_PARTS, _NAMES, strict=True))
OTHER = "other"

# A tenth of a step: below it, a remark costs the reader more time than the run.
_REMARKABLE = 0.10
# Less is predicted by rounding alone.
_NONE_S = 1e-6


def verdict(summary: Summary) -> str:
    """Return the sentence that stands first: the best advice, or without any the run in one sentence."""
    advices = advise(summary)
    return advices[0].sentence if advices else headline(summary)


def headline(summary: Summary) -> str:
    """Return the run in one sentence."""
    where = f"on {counted(summary.workers, 'worker')}"
    if not summary.steps:
        how = {"failed": "Failed", "stopped": "Stopped", "unfinished": "Nothing measured yet: cut off or still"}
        return f"{how.get(summary.status, 'Ended')} before the first step {where}."
    rate = "" if summary.units_per_s is None else f" at {rate_in_words(summary.units_per_s)} {summary.unit}/s"
    return f"{_deed(summary)} {where}{rate}{_largest_cost(summary)}."


def remarks(summary: Summary) -> Iterator[str]:
    """Yield a sentence for each thing that stands out, besides what there is advice on (see advice/)."""
    yield from summary.job.notes if summary.job else ()
    advised = {advice.bottleneck for advice in advise(summary)}
    fractions = dict(step_fractions(summary))
    if fractions.get("data", 0.0) > _REMARKABLE and "data" not in advised:
        yield f"Loading data takes {percent(fractions['data'])} of each step."
    if "straggler" not in advised:
        yield from _imbalance(summary)
    if (
        summary.predicted
        and summary.parts
        and fractions.get("communication", 0.0) > _REMARKABLE
        and "link" not in advised
    ):
        measured_s, predicted_s = summary.parts["comm_s"], summary.predicted.comm_s
        if measured_s > 1.5 * predicted_s:
            predicted = f"{1e3 * predicted_s:.3g} ms were" if predicted_s > _NONE_S else "none was"
            times = f"{1e3 * measured_s:.3g} ms of each step, and {predicted} predicted"
            yield f"Waiting for communication took {times}: a late worker, or a busy link, keeps the others waiting."
    yield from failed_advisers(summary)


def step_fractions(summary: Summary) -> list[tuple[str, float]]:
    """Return each part of the slowest worker's steady step as (name, fraction of the whole), in the order of a step."""
    slowest = summary.slowest
    if not slowest or not slowest.parts or not slowest.total_s:
        return []
    shown = {
        name: seconds for name, seconds in slowest.parts.items() if seconds or name not in ("bubble_s", "checkpoint_s")
    }
    parts = [(PART_NAMES[name], seconds / slowest.total_s) for name, seconds in shown.items()]
    rest = 1 - sum(fraction for _, fraction in parts)
    return [*parts, (OTHER, rest)] if rest > 0.005 else parts


def counted(count: int, word: str) -> str:
    """Return '1 step' or '1,200 steps'."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"


def rate_in_words(per_s: float) -> str:
    """Return a rate with three digits or more: '3,912', '61.2', '0.0531'."""
    return f"{per_s:,.0f}" if per_s >= 99.95 else f"{per_s:.3g}"


def metric_in_words(value: float | None) -> str:
    """Return a metric with four digits."""
    return "not finite" if value is None else f"{value:.4g}"


def ratio_of(measured: float | None, predicted: float | None) -> float | None:
    """Return measured / predicted, or None where one of them is unknown or nothing was predicted."""
    return measured / predicted if measured is not None and predicted else None


def _deed(summary: Summary) -> str:
    if summary.status == "done":
        return f"Trained {counted(summary.steps, 'step')}"
    steps = f"{summary.steps:,} of {counted(summary.planned_steps, 'step')}" if summary.planned_steps else ""
    steps = steps or counted(summary.steps, "step")
    return f"Unfinished after {steps}" if summary.status == "unfinished" else f"{summary.status.title()} after {steps}"


def _largest_cost(summary: Summary) -> str:
    """Return the clause on what a step waits for; a worker alone waits for nobody, so its largest part is named."""
    fractions = dict(step_fractions(summary))
    if not fractions:
        return ""
    if summary.workers > 1:
        return f"; {percent(fractions['communication'])} of each step was spent waiting for communication"
    largest = max(fractions, key=lambda name: fractions[name])
    return f"; the largest part of each step was {largest} ({percent(fractions[largest])})"


def _imbalance(summary: Summary) -> Iterator[str]:
    waits = [(worker.parts["comm_s"], worker) for worker in summary.per_worker if worker.parts and worker.total_s]
    if len(waits) < 2 or not summary.slowest:
        return
    wait_s, fastest = max(waits, key=lambda item: item[0])
    extra = (wait_s - min(wait for wait, _ in waits)) / (fastest.total_s or 1.0)
    if extra > _REMARKABLE and fastest.rank != summary.slowest.rank:
        yield f"Worker {fastest.rank} waits {percent(extra)} of each step for worker {summary.slowest.rank}."

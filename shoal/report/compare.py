"""Predicted beside measured: the rows that the terminal and the page both show."""

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple

from shoal.core.units import format_bytes, format_seconds
from shoal.report.logs.measured import Stretch
from shoal.report.sent import BETWEEN, INSIDE, sent_bytes
from shoal.report.summary import Summary
from shoal.report.verdict import rate_in_words, ratio_of

UNKNOWN = "-"

# With more workers than this, only the one with the most memory is shown beside its prediction.
_WORKERS_SHOWN = 4


class Comparison(NamedTuple):
    """One quantity, ready to be read."""

    name: str
    predicted: str
    measured: str
    ratio: str


def compare(summary: Summary) -> list[Comparison]:
    """Return all that is predicted, beside what was measured of it; rows known to neither go."""
    predicted = asdict(summary.predicted) if summary.predicted else {}
    comm_s, bubble_s = ((summary.parts or {}).get(name) for name in ("comm_s", "bubble_s"))
    rows = [
        _row("step, without data loading", predicted.get("step_s"), summary.step_s, format_seconds),
        _row("waiting for communication", predicted.get("comm_s"), comm_s, format_seconds),
        _row("waiting in the pipeline", predicted.get("bubble_s"), bubble_s, format_seconds),
        _row("samples/s", predicted.get("samples_per_s"), summary.samples_per_s, rate_in_words),
        _micro_batch_row(summary),
        *_byte_rows(summary),
        *_memory_rows(summary),
        *_stall_rows(summary),
        *_share_rows(summary),
    ]
    if not bubble_s and not predicted.get("bubble_s"):  # there is no pipeline
        del rows[2]
    if summary.workers == 1:  # a worker alone waits for nobody
        del rows[1]
    return [row for row in rows if (row.predicted, row.measured) != (UNKNOWN, UNKNOWN)]


def in_words(value: float | None, words: Callable[[float], str]) -> str:
    """Return `words(value)`, or the sign for what is unknown; so is what no number holds."""
    return UNKNOWN if value is None or not math.isfinite(value) else words(value)


def _micro_batch_row(summary: Summary) -> Comparison:
    """Return what forward and backward of a micro-batch take, however they divide into starts and samples."""
    predicted, plan, worker = summary.predicted, summary.plan, summary.slowest
    samples = max(1, round(worker.samples or 0.0)) if worker else 1
    size = min(samples, (plan.batch.micro_batch if plan else None) or samples)
    known = predicted is not None and predicted.sample_s > 0
    predicted_s = predicted.fixed_s + size * predicted.sample_s if predicted is not None and known else None
    passes_s = worker.median_passes_s if worker else None
    measured_s = None if passes_s is None else passes_s / math.ceil(samples / size)
    name = f"forward and backward of {size} sample{'s' * (size > 1)}"
    return _row(name, predicted_s, measured_s, format_seconds)


def _stall_rows(summary: Summary) -> Iterator[Comparison]:
    stalls = [saved.stall_s for saved in summary.saves if not saved.error]
    if stalls:
        predicted_s = summary.predicted.stall_s if summary.predicted else 0.0
        yield _row("a checkpoint holds training up", predicted_s or None, sum(stalls) / len(stalls), format_seconds)


def _byte_rows(summary: Summary) -> Iterator[Comparison]:
    """Yield what a worker sends in a step, within its node and beyond it."""
    for field, name, where in (
        ("inside_bytes", "inside its node", INSIDE),
        ("between_bytes", "to other nodes", BETWEEN),
    ):
        predicted = getattr(summary.predicted, field) if summary.predicted else 0
        measured = sent_bytes(summary, where)
        if predicted or measured:
            yield _row(f"bytes a worker sends {name}, a step", predicted or None, measured, format_bytes)


def _share_rows(summary: Summary) -> Iterator[Comparison]:
    """Yield what each change of the shares was predicted to bring, beside the steps before and after it."""
    for shares in summary.shares[-3:]:
        if shares.predicted_gain:
            before = [s for s in summary.stretches[summary.warm_up_steps :] if s.last < shares.step]
            after = [stretch for stretch in summary.stretches if stretch.first >= shares.step]
            gain = _mean_s(before) / _mean_s(after) if before and after and _mean_s(after) > 0 else None
            yield _row(f"gain by new shares at step {shares.step:,}", shares.predicted_gain, gain, "{:.2f}x".format)


def _mean_s(stretches: list[Stretch]) -> float:
    steps = sum(stretch.last - stretch.first + 1 for stretch in stretches)
    return sum(sum(s.parts_s) * (s.last - s.first + 1) for s in stretches) / steps


def _memory_rows(summary: Summary) -> Iterator[Comparison]:
    predicted = summary.predicted.peak_bytes if summary.predicted else ()
    ranks = list(range(summary.workers))
    most = max(ranks, key=lambda rank: summary.peak_bytes[rank] or -1, default=0)
    for rank in ranks if len(ranks) <= _WORKERS_SHOWN else [most]:
        name = f"peak memory, worker {rank}" + ("" if len(ranks) <= _WORKERS_SHOWN else " (the most)")
        yield _row(name, predicted[rank] if rank < len(predicted) else None, summary.peak_bytes[rank], format_bytes)


def _row(name: str, predicted: float | None, measured: float | None, words: Callable[[float], str]) -> Comparison:
    ratio = ratio_of(measured, predicted)
    return Comparison(name, in_words(predicted, words), in_words(measured, words), in_words(ratio, "{:.2f}".format))

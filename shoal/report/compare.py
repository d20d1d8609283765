"""Predicted beside measured: the rows that the terminal and the page both show."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import NamedTuple

from shoal.core.units import format_bytes, format_seconds
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
    """Return step time, waiting, samples/s and peak memory, each predicted and measured; rows known to neither go."""
    predicted = asdict(summary.predicted) if summary.predicted else {}
    comm_s, bubble_s = ((summary.parts or {}).get(name) for name in ("comm_s", "bubble_s"))
    rows = [
        _row("step, without data loading", predicted.get("step_s"), summary.step_s, format_seconds),
        _row("waiting for communication", predicted.get("comm_s"), comm_s, format_seconds),
        _row("waiting in the pipeline", predicted.get("bubble_s"), bubble_s, format_seconds),
        _row("samples/s", predicted.get("samples_per_s"), summary.samples_per_s, rate_in_words),
        *_memory_rows(summary),
    ]
    if not bubble_s and not predicted.get("bubble_s"):  # there is no pipeline
        del rows[2]
    if summary.workers == 1:  # a worker alone waits for nobody
        del rows[1]
    return [row for row in rows if (row.predicted, row.measured) != (UNKNOWN, UNKNOWN)]


def in_words(value: float | None, words: Callable[[float], str]) -> str:
    """Return `words(value)`, or the sign for what is unknown."""
    return UNKNOWN if value is None else words(value)


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

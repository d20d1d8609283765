"""What each worker did in one step, moment by moment, from the traces of a run (see core/events.py).

Where no step was traced, the steady step of each worker is laid out instead, its parts one after the other.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.run_folder import RunFolder
from shoal.report.logs.log import amount, clean, whole
from shoal.report.summary import Summary

KINDS = (
    "data",
    "forward",
    "backward",
    "optimizer",
    "compute",
    "communication",
    "waiting",
    "bubble",
    "checkpoint",
    "other",
)
"""What a span is: the parts of a step, with compute told apart by name where it can be."""
_COMPUTE = ("forward", "backward", "optimizer")
_LAID_OUT = ("data_s", "forward_s", "backward_s", "comm_s", "bubble_s", "optimizer_s", "checkpoint_s")

MOST_STEPS = 6
"""So many traced steps are put on the page; all others open in Perfetto."""
_MOST_SPANS = 300
"""Of one worker in one step; the shortest beyond go."""
_MOST_WORKERS = 64
_MOST_BYTES = 64_000_000
"""A larger trace is not read for the page."""


class Span(NamedTuple):
    """Something that took its time."""

    row: str
    """The worker, and where it does several things at once, which of them."""
    kind: str
    name: str
    start_s: float
    """Since the first span of the step."""
    seconds: float


@dataclass(frozen=True)
class Timeline:
    """One step of all workers."""

    title: str
    why: str
    """Why there is a trace of it; empty where there is none."""
    spans: tuple[Span, ...]
    lacking: int = 0
    """How many of its traces could not be read."""

    @property
    def rows(self) -> list[str]:
        """The rows, in order."""
        return list(dict.fromkeys(span.row for span in self.spans))


def read_timelines(run: RunFolder, summary: Summary) -> list[Timeline]:
    """Return the traced steps that the page shows, those asked for first; or one made of means; or none at all."""
    files: dict[int, dict[int, Path]] = defaultdict(dict)
    for path in run.traces.glob("rank-*-step-*.json"):
        match = re.fullmatch(r"rank-(\d{1,6})-step-(\d{1,12})\.json", path.name)
        if match:
            files[int(match[2])][int(match[1])] = path
    whys = {trace.step: trace.why for trace in summary.traces}
    order = sorted(files, key=lambda step: (whys.get(step, "").startswith("outlier"), step))
    found = [_traced(step, files[step], whys.get(step, "")) for step in order[:MOST_STEPS]]
    known = [timeline for timeline in found if timeline.spans]
    return known or [timeline for timeline in [_laid_out(summary)] if timeline.spans]


class _Traced(NamedTuple):
    """A span as a trace has it: its times in microseconds since 1970."""

    lane: int
    lane_name: str
    kind: str
    name: str
    start_us: float
    duration_us: float


def _traced(step: int, paths: dict[int, Path], why: str) -> Timeline:
    traced = {rank: _read_trace(paths[rank]) for rank in sorted(paths)[:_MOST_WORKERS]}
    lacking = sum(events is None for events in traced.values())
    found = {rank: _longest(list(_spans_of(events or []))) for rank, events in traced.items()}
    began_us = min((span.start_us for spans in found.values() for span in spans), default=0.0)
    shown = []
    for rank, spans in found.items():
        is_single = len({span.lane for span in spans}) == 1
        for span in sorted(spans, key=lambda span: (span.lane, span.start_us)):
            row = f"{rank}" if is_single else f"{rank} {span.lane_name}"
            start_s = (span.start_us - began_us) / 1e6
            shown.append(Span(row, span.kind, span.name, start_s, span.duration_us / 1e6))
    return Timeline(f"step {step:,}", why, tuple(shown), lacking)


def _read_trace(path: Path) -> list[Any] | None:
    """Return the events of a trace; None where it cannot be read."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return None
        trace = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    events = trace.get("traceEvents") if isinstance(trace, dict) else None
    return events if isinstance(events, list) else None


def _spans_of(events: list[Any]) -> Iterator[_Traced]:
    """Yield each whole span."""
    plain = [event for event in events if isinstance(event, dict)]
    named = {whole(event.get("tid")): event.get("args") for event in plain if event.get("name") == "thread_name"}
    for event in plain:
        start_us, duration_us, lane = amount(event.get("ts")), amount(event.get("dur")), whole(event.get("tid")) or 0
        if event.get("ph") == "X" and start_us is not None and duration_us is not None and duration_us >= 0:
            said = named.get(lane)
            lane_name = clean(said.get("name", lane) if isinstance(said, dict) else lane)
            name = clean(event.get("name", ""))
            yield _Traced(lane, lane_name, _kind(name, event.get("cat")), name, start_us, duration_us)


def _kind(name: str, category: Any) -> str:
    first = re.split(r"[^a-z]", name.lower(), maxsplit=1)[0]
    if category == "compute" and first in _COMPUTE:
        return first
    return category if category in KINDS else "other"


def _longest(spans: list[_Traced]) -> list[_Traced]:
    return sorted(spans, key=lambda span: -span.duration_us)[:_MOST_SPANS]


def _laid_out(summary: Summary) -> Timeline:
    """Return the mean steady step of each worker."""
    spans = []
    for worker in summary.per_worker[:_MOST_WORKERS]:
        at_s = 0.0
        waiting_s = (worker.split or {}).get("waiting", 0.0)
        for part in _LAID_OUT:
            seconds = (worker.parts or {}).get(part, 0.0)
            pieces = [(part.removesuffix("_s"), seconds)]
            if part == "comm_s":
                pieces = [("waiting", waiting_s), ("communication", seconds - waiting_s)]
            for kind, length_s in pieces:
                if length_s > 0:
                    spans.append(Span(f"{worker.rank}", kind, kind, at_s, length_s))
                    at_s += length_s
    return Timeline("mean step", "", tuple(spans))

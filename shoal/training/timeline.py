"""One step of one worker, moment by moment, as a file that Perfetto (ui.perfetto.dev) and chrome://tracing open.

1. What the clock has noted is flattened: marks tile the step, spans lie over them, waits over both. At each moment the
   innermost counts, so that nothing overlaps and the seconds of each name are those of the step's event.
2. Collectives, and chunks that threads load, run beside that: in lanes of their own, as many as overlap.
3. Times are microseconds since 1970, so that the traces of several workers can be laid one above the other.

Example: mark data at 2 ms, forward at 10, a wait from 4 to 5. That is data from 0 to 2, forward from 2 to 4,
communication from 4 to 5, forward from 5 to 10.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from shoal.comm.traffic import Kind, Spent
from shoal.training.clock import Taken, seconds_between

CATEGORIES = {
    "data_s": "data",
    "forward_s": "compute",
    "backward_s": "compute",
    "optimizer_s": "compute",
    "comm_s": "communication",
    "bubble_s": "bubble",
    "checkpoint_s": "checkpoint",
}
"""What each name of the clock is, in the words of the report; "other" is what is not here."""
_MOST_SEGMENTS = 20_000


class Segment(NamedTuple):
    """Some time of a step, in seconds since its begin, and what it went to."""

    name: str
    begin_s: float
    end_s: float
    micro_batch: int | None = None


def segments(taken: Taken) -> list[Segment]:
    """Return where the time of a step went, moment by moment. On a GPU this waits until the step is done."""
    ends = [taken.since_begin_s(moment) for _, moment in taken.marks[1:]]
    names = [name for name, _ in taken.marks[1:]]
    tiles = [Segment(*each) for each in zip(names, [0.0, *ends], ends, strict=False)]
    spans = [
        Segment(span.name, taken.since_begin_s(span.begin), taken.since_begin_s(span.end), span.micro_batch)
        for span in taken.spans
    ]
    outer, inner = _levels(spans)
    found = _laid_over(_laid_over(_numbered(tiles), outer), inner)
    return [each for each in found if each.end_s > each.begin_s][:_MOST_SEGMENTS]


def _levels(spans: Iterable[Segment]) -> tuple[list[Segment], list[Segment]]:
    """Return the spans that lie in no other, and those that do."""
    outer: list[Segment] = []
    inner: list[Segment] = []
    for span in sorted(spans, key=lambda span: (span.begin_s, -span.end_s)):
        is_inside = bool(outer) and span.begin_s < outer[-1].end_s
        (inner if is_inside else outer).append(span)
    return outer, inner


def _numbered(tiles: Sequence[Segment]) -> list[Segment]:
    """Number the forwards and the backwards, where a step has several: each is a micro-batch."""
    numbered, seen = [], dict.fromkeys(("forward_s", "backward_s"), 0)
    has_several = sum(tile.name == "forward_s" for tile in tiles) > 1
    for tile in tiles:
        if tile.name in seen and has_several:
            numbered.append(tile._replace(micro_batch=seen[tile.name]))
            seen[tile.name] += 1
        else:
            numbered.append(tile)
    return numbered


def _laid_over(below: Sequence[Segment], above: Sequence[Segment]) -> list[Segment]:
    """Return `below`, with `above` in its place where they overlap; each is in order, and does not overlap itself."""
    found, at = [], 0
    for tile in below:
        begin_s = tile.begin_s
        while at < len(above) and above[at].begin_s < tile.end_s:
            over = above[at]
            if over.begin_s > begin_s:
                found.append(tile._replace(begin_s=begin_s, end_s=over.begin_s))
            if over.end_s > begin_s:
                found.append(over._replace(begin_s=max(begin_s, over.begin_s), end_s=min(over.end_s, tile.end_s)))
                begin_s = min(over.end_s, tile.end_s)
            if over.end_s > tile.end_s:
                break  # it goes on in the next tile
            at += 1
        if begin_s < tile.end_s:
            found.append(tile._replace(begin_s=begin_s))
    return found


def began_at_s(taken: Taken) -> float:
    """Return when the time of a step began, in seconds since 1970. On a GPU this waits for what it has been given."""
    begin = taken.marks[0][1]
    if not isinstance(begin, torch.cuda.Event):
        return time.time() - (time.perf_counter() - float(begin))
    now = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    now.record()
    passed_s = seconds_between(begin, now)  # it waits until now is past
    return time.time() - passed_s


def trace_json(
    taken: Taken, *, rank: int, step: int, loads: Iterable[tuple[int, float, float]], why: str = "asked"
) -> str:
    """Return the trace of a step: `loads` are which thread loaded, from when to when (time.perf_counter)."""
    began_s = began_at_s(taken)
    lanes = _Lanes(rank, began_s)
    tiles = segments(taken)
    length_s = tiles[-1].end_s if tiles else 0.0
    for segment in tiles:
        category = CATEGORIES.get(segment.name, "other")
        name = category if category == "communication" else segment.name.removesuffix("_s")
        numbered = {} if segment.micro_batch is None else {"micro_batch": segment.micro_batch}
        lanes.add("step", name, category, (segment.begin_s, segment.end_s), **numbered)
    for call, begin_s, end_s, lane in _in_lanes((each.kind, *_times(taken, each)) for each in taken.calls):
        where = "communication" if lane == 0 else f"communication {lane + 1}"
        details = {"algorithm": call.algorithm, "link": call.link, "bytes": call.num_bytes}
        lanes.add(where, call.op, "communication", (begin_s, end_s), **details)
    host_s = time.time() - time.perf_counter() - began_s  # from the host's clock to seconds since the step's begin
    threads: dict[int, int] = {}
    for thread, begin, end in loads:
        begin_s, end_s = begin + host_s, end + host_s
        if end_s > 0 and begin_s < length_s:
            number = threads.setdefault(thread, len(threads) + 1)
            lanes.add(f"loading {number}", "fill", "data", (begin_s, end_s))
    return json.dumps({"traceEvents": lanes.events, "otherData": {"step": step, "worker": rank, "why": why}})


def _times(taken: Taken, call: Spent) -> tuple[float, float]:
    return taken.since_begin_s(call.begin), taken.since_begin_s(call.end)


def _in_lanes(calls: Iterable[tuple[Kind, float, float]]) -> Iterator[tuple[Kind, float, float, int]]:
    """Yield each call with the number of a lane in which no other runs at the time."""
    ends: list[float] = []
    for kind, begin_s, end_s in sorted(calls, key=lambda call: call[1:]):
        free = next((lane for lane, until_s in enumerate(ends) if until_s <= begin_s), len(ends))
        ends[free:] = [end_s, *ends[free + 1 :]]
        yield kind, begin_s, end_s, free


class _Lanes:
    """The events of a trace, in lanes that are numbered as they come."""

    def __init__(self, rank: int, began_s: float) -> None:
        self._rank, self._began_s = rank, began_s
        self._numbers: dict[str, int] = {}
        self.events: list[dict[str, Any]] = [_named("process_name", rank, 0, f"worker {rank}")]

    def add(self, lane: str, name: str, category: str, from_to_s: tuple[float, float], **args: Any) -> None:
        if lane not in self._numbers:
            self._numbers[lane] = len(self._numbers)
            self.events.append(_named("thread_name", self._rank, self._numbers[lane], lane))
        begin_us, end_us = (round(1e6 * (self._began_s + at_s)) for at_s in from_to_s)
        self.events.append(
            {
                "name": name,
                "cat": category,
                "ph": "X",
                "ts": begin_us,
                "dur": end_us - begin_us,
                "pid": self._rank,
                "tid": self._numbers[lane],
                "args": args,
            }
        )


def _named(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}

"""A step moment by moment, from moments given by hand."""

import json
import time

import pytest

from shoal.comm.traffic import Kind, Spent
from shoal.training.clock import Span, Taken
from shoal.training.timeline import Segment, segments, trace_json

MARKS = [("", 100.0), ("data_s", 102.0), ("bubble_s", 112.0), ("optimizer_s", 113.0)]
SPANS = [
    Span("forward_s", 103.0, 105.0, 0),
    Span("comm_s", 104.0, 104.5),
    Span("backward_s", 108.0, 111.0, 0),
    Span("comm_s", 112.25, 112.5),
]


def test_at_each_moment_the_innermost_counts_and_nothing_overlaps() -> None:
    taken = Taken(MARKS, SPANS, [], began_s=100.0)
    found = segments(taken)
    assert found == [
        Segment("data_s", 0.0, 2.0),
        Segment("bubble_s", 2.0, 3.0),
        Segment("forward_s", 3.0, 4.0, 0),
        Segment("comm_s", 4.0, 4.5),
        Segment("forward_s", 4.5, 5.0, 0),
        Segment("bubble_s", 5.0, 8.0),
        Segment("backward_s", 8.0, 11.0, 0),
        Segment("bubble_s", 11.0, 12.0),
        Segment("optimizer_s", 12.0, 12.25),
        Segment("comm_s", 12.25, 12.5),
        Segment("optimizer_s", 12.5, 13.0),
    ]
    sums: dict[str, float] = {}
    for name, begin_s, end_s, _ in found:
        sums[name] = sums.get(name, 0.0) + end_s - begin_s
    assert sums == pytest.approx(taken())


def test_the_forwards_and_backwards_of_several_micro_batches_are_numbered() -> None:
    names = ["forward_s", "backward_s", "forward_s", "backward_s", "comm_s"]
    marks = [("", 0.0), *((name, float(number)) for number, name in enumerate(names, start=1))]
    numbers = [segment.micro_batch for segment in segments(Taken(marks, [], [], began_s=0.0))]
    assert numbers == [0, 0, 1, 1, None]


def test_a_span_that_lies_over_two_marks_is_cut_where_they_meet() -> None:
    marks = [("", 0.0), ("forward_s", 2.0), ("backward_s", 4.0)]
    found = segments(Taken(marks, [Span("comm_s", 1.0, 3.0)], [], began_s=0.0))
    assert [(name, begin_s, end_s) for name, begin_s, end_s, _ in found] == [
        ("forward_s", 0.0, 1.0),
        ("comm_s", 1.0, 2.0),
        ("comm_s", 2.0, 3.0),
        ("backward_s", 3.0, 4.0),
    ]


def test_a_trace_has_a_lane_for_the_step_and_one_for_each_thing_that_runs_beside_it() -> None:
    now = time.perf_counter()
    marks = [("", now), ("forward_s", now + 1.0), ("other_s", now + 2.0)]
    kind = Kind("all-reduce", "ring", "network", 1024)
    calls = [Spent(kind, now + 0.5, now + 1.5), Spent(kind, now + 1.0, now + 1.25), Spent(kind, now + 1.75, now + 2.0)]
    loads = [(77, now + 0.25, now + 0.75), (77, now - 9.0, now - 8.0)]
    taken = Taken(marks, [], calls, began_s=now)
    trace = json.loads(trace_json(taken, rank=3, step=5, loads=loads))
    events = trace["traceEvents"]
    lanes = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert sorted(lanes.values()) == ["communication", "communication 2", "loading 1", "step"]
    assert {event["pid"] for event in events} == {3}
    spans = [event for event in events if event["ph"] == "X"]
    in_lanes = [(lanes[event["tid"]], event["name"], event["cat"], event["dur"]) for event in spans]
    assert in_lanes == [
        ("step", "forward", "compute", 1_000_000),
        ("step", "other", "other", 1_000_000),
        ("communication", "all-reduce", "communication", 1_000_000),
        ("communication 2", "all-reduce", "communication", 250_000),
        ("communication", "all-reduce", "communication", 250_000),
        ("loading 1", "fill", "data", 500_000),
    ]
    assert spans[2]["args"] == {"algorithm": "ring", "link": "network", "bytes": 1024}
    assert abs(spans[0]["ts"] / 1e6 - time.time()) < 60  # seconds since 1970

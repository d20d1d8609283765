"""The event simulation, held against closed forms, against what a schedule may never do, and against bounds."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.planner.time.schedules import BACKWARD, FORWARD, WEIGHTS, runs_interleaved
from shoal.planner.time.simulate import Layered, Piece, Timeline, simulate_overlap, simulate_pipeline
from shoal.spec.plan import SCHEDULES

FORWARD_S, BACKWARD_S, WEIGHTS_S = 1.0, 2.25, 1.0
SIZES = [(2, 2), (2, 9), (3, 7), (4, 8), (8, 8), (8, 32)]


def equal_stages(schedule: str, *, stages: int, micro_batches: int, chunks: int = 1, send_s: float = 0.0) -> Timeline:
    piece = Piece(forward_s=FORWARD_S / chunks, backward_s=BACKWARD_S / chunks, weights_s=WEIGHTS_S / chunks)
    return simulate_pipeline(
        [piece] * (stages * chunks), stages=stages, micro_batches=micro_batches, schedule=schedule, send_s=send_s
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_the_bubble_of_equal_stages_is_one_micro_batch_for_every_other_stage(
    schedule: str, stages: int, micro_batches: int
) -> None:
    timeline = equal_stages(schedule, stages=stages, micro_batches=micro_batches)
    ideal_s = micro_batches * (FORWARD_S + BACKWARD_S)
    assert timeline.busy_s == pytest.approx([ideal_s] * stages)
    assert timeline.bubble_s == pytest.approx([(stages - 1) / micro_batches * ideal_s] * stages)


@pytest.mark.parametrize("chunks", [2, 3, 4])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (4, 8), (8, 32)])
def test_interleaving_divides_the_bubble_by_the_chunks(stages: int, micro_batches: int, chunks: int) -> None:
    timeline = equal_stages("interleaved", stages=stages, micro_batches=micro_batches, chunks=chunks)
    bubble_s = (stages - 1) * (FORWARD_S + BACKWARD_S) / chunks
    assert timeline.bubble_s == pytest.approx([bubble_s] * stages)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_the_zero_bubble_schedule_saves_twice_the_gradients_of_the_weights(stages: int, micro_batches: int) -> None:
    timeline = equal_stages("zero-bubble", stages=stages, micro_batches=micro_batches)
    for_input_s = BACKWARD_S - WEIGHTS_S
    assert timeline.bubble_s == pytest.approx([(stages - 1) * (FORWARD_S + for_input_s - WEIGHTS_S)] * stages)


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
def test_what_is_in_flight_is_all_with_gpipe_and_the_stages_behind_with_1f1b(stages: int, micro_batches: int) -> None:
    def in_flight(schedule: str) -> tuple[int, ...]:
        return equal_stages(schedule, stages=stages, micro_batches=micro_batches).in_flight

    assert in_flight("gpipe") == (micro_batches,) * stages
    assert in_flight("1f1b") == tuple(min(micro_batches, stages - stage) for stage in range(stages))
    assert in_flight("zero-bubble") == (min(micro_batches, stages),) * stages


def test_interleaving_holds_more_pieces_of_a_smaller_size() -> None:
    # 2 (p - stage - 1) + (chunks - 1) p + 1 forwards of half a stage: 5.5, 4.5, 3.5 and 2.5 whole ones.
    assert equal_stages("interleaved", stages=4, micro_batches=8, chunks=2).in_flight == (11, 9, 7, 5)


def test_a_send_delays_the_first_and_the_last_micro_batch_of_each_stage() -> None:
    without = equal_stages("gpipe", stages=4, micro_batches=8)
    with_send = equal_stages("gpipe", stages=4, micro_batches=8, send_s=0.5)
    assert with_send.makespan_s == pytest.approx(without.makespan_s + 2 * 3 * 0.5)  # there and back, over 3 borders


def test_the_slowest_stage_sets_the_pace() -> None:
    slow = Piece(forward_s=2, backward_s=4)
    fast = Piece(forward_s=1, backward_s=2)
    timeline = simulate_pipeline([fast, slow, fast], stages=3, micro_batches=50, schedule="1f1b")
    assert timeline.bubble_s[1] == min(timeline.bubble_s)
    # The slow stage, a forward and a backward in front of it, and 1 s in which it waits for the first backward.
    assert timeline.makespan_s == pytest.approx(50 * 6 + 1 + 2 + 1)


def test_one_stage_has_no_bubble() -> None:
    for schedule in ("gpipe", "1f1b", "zero-bubble"):
        assert equal_stages(schedule, stages=1, micro_batches=5, send_s=9.0).bubble_s == pytest.approx([0.0])


@given(
    schedule=st.sampled_from(SCHEDULES),
    seconds=st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0, 5)), min_size=1, max_size=6),
    micro_batches=st.integers(1, 12),
    chunks=st.integers(2, 3),
    send_s=st.floats(0, 3),
)
def test_every_schedule_does_all_work_once_and_never_before_what_it_needs(
    schedule: str, seconds: list[tuple[float, float, float]], micro_batches: int, chunks: int, send_s: float
) -> None:
    chunks = chunks if schedule == "interleaved" else 1
    stages = len(seconds)
    if schedule == "interleaved" and not runs_interleaved(micro_batches, stages):
        return
    pieces = [Piece(forward_s=f, backward_s=b + w, weights_s=w) for f, b, w in seconds] * chunks
    timeline = simulate_pipeline(pieces, stages=stages, micro_batches=micro_batches, schedule=schedule, send_s=send_s)
    ends = {(e.chunk * stages + e.stage, e.kind, e.micro_batch): e.end_s for e in timeline.events}
    starts = {(e.chunk * stages + e.stage, e.kind, e.micro_batch): e.start_s for e in timeline.events}
    kinds = 3 if schedule == "zero-bubble" else 2
    assert len(starts) == len(timeline.events) == len(pieces) * micro_batches * kinds, "all work, once"
    wire_s = send_s if stages > 1 else 0.0
    for (piece, kind, number), start_s in starts.items():
        if kind == FORWARD and piece > 0:
            assert start_s >= ends[piece - 1, FORWARD, number] + wire_s
        if kind == BACKWARD:
            assert start_s >= ends[piece, FORWARD, number]
        if kind == BACKWARD and piece + 1 < len(pieces):
            assert start_s >= ends[piece + 1, BACKWARD, number] + wire_s
        if kind == WEIGHTS:
            assert start_s >= ends[piece, BACKWARD, number]
    for stage in range(stages):
        own = [event for event in timeline.events if event.stage == stage]
        assert all(b.start_s >= a.end_s for a, b in itertools.pairwise(own)), "one thing at a time"


def test_gradients_hide_behind_the_backward_but_for_the_last() -> None:
    layers = [Layered(compute_s=1.0, reduce_s=0.5)] * 6
    assert simulate_overlap(layers).exposed_s == pytest.approx(0.5)


def test_a_link_slower_than_the_backward_shows_all_but_what_the_backward_hides() -> None:
    layers = [Layered(compute_s=1.0, reduce_s=3.0)] * 6
    overlap = simulate_overlap(layers)
    assert overlap.end_s == pytest.approx(1 + 6 * 3)  # it starts after the first layer, and never stops
    assert overlap.exposed_s == pytest.approx(1 + 6 * 3 - 6)


def test_parameters_gathered_one_layer_ahead_hide_but_for_the_first() -> None:
    layers = [Layered(compute_s=1.0, gather_s=0.75)] * 4
    assert simulate_overlap(layers).exposed_s == pytest.approx(0.75)
    slow = [Layered(compute_s=1.0, gather_s=2.0)] * 4
    assert simulate_overlap(slow).end_s == pytest.approx(4 * 2 + 1)


def test_gathers_and_reductions_share_the_link() -> None:
    # The backward of ZeRO-3 over two layers: gather, gather beside the first, then both reductions in turn.
    layers = [Layered(compute_s=1.0, gather_s=1.0, reduce_s=1.0)] * 2
    overlap = simulate_overlap(layers)
    assert overlap.messages == ((0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0))
    assert (overlap.end_s, overlap.exposed_s) == (4.0, 2.0)


@given(layers=st.lists(st.builds(Layered, *[st.floats(0, 3)] * 3), max_size=8))
def test_a_pass_takes_at_least_its_computing_and_its_messages_and_at_most_both(layers: list[Layered]) -> None:
    compute_s = sum(layer.compute_s for layer in layers)
    sent_s = sum(layer.gather_s + layer.reduce_s for layer in layers)
    end_s = simulate_overlap(layers).end_s
    assert max(compute_s, sent_s) - 1e-9 <= end_s <= compute_s + sent_s + 1e-9

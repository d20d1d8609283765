"""The algorithms as data, played in one process: for any number of workers the sum, the steps and the bytes.

The reference for steps and bytes are the closed forms of planner/collectives, with a number as the unit of bytes.
"""

from collections import deque
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.comm.algorithms.broadcast import chain_from
from shoal.comm.algorithms.halving_doubling import all_gather_steps as doubling_gather
from shoal.comm.algorithms.halving_doubling import all_reduce_steps as halving_doubling
from shoal.comm.algorithms.halving_doubling import reduce_scatter_steps as halving_scatter
from shoal.comm.algorithms.naive import all_reduce_steps as naive
from shoal.comm.algorithms.recursive_doubling import all_reduce_steps as recursive_doubling
from shoal.comm.algorithms.ring import all_gather_steps as ring_gather
from shoal.comm.algorithms.ring import all_reduce_steps as ring
from shoal.comm.algorithms.ring import reduce_scatter_steps as ring_scatter
from shoal.comm.algorithms.steps import Message, Schedule, Step, compiled, part, spans
from shoal.comm.algorithms.tree import all_reduce_steps as tree
from shoal.comm.algorithms.tree import broadcast_from
from shoal.planner.collectives import allreduce as forms

ALL_REDUCES: dict[str, Schedule] = {
    "naive": naive,
    "tree": tree,
    "ring": ring,
    "halving-doubling": halving_doubling,
    "recursive-doubling": recursive_doubling,
}


def play(schedule: Schedule, count: int, numel: int, piece_numel: int) -> tuple[list[list[frozenset[int]]], list[int]]:
    """Return what each worker ends with, and how many numbers each has sent.

    A number is the set of the workers that it is the sum of: nobody may be added twice. Workers take turns; a message
    that is not there yet makes a worker wait for its next turn.
    """
    have = [[frozenset([worker]) for _ in range(numel)] for worker in range(count)]
    sent, mail = [0] * count, dict[tuple[int, int, int], list[frozenset[int]]]()
    left = [deque(compiled(schedule, worker, count, numel, piece_numel)) for worker in range(count)]
    for _ in range(4 * count + 4):
        for worker in range(count):
            while left[worker]:
                step = left[worker][0]
                for piece in step.sends:
                    key = (worker, piece.other, piece.tag)
                    if key not in mail:
                        mail[key] = have[worker][piece.begin : piece.end]
                        sent[worker] += piece.end - piece.begin
                if any((piece.other, worker, piece.tag) not in mail for piece in step.receives):
                    break
                for piece in step.receives:
                    arrived = mail[piece.other, worker, piece.tag]
                    assert len(arrived) == piece.end - piece.begin
                    for place, value in enumerate(arrived, piece.begin):
                        assert not piece.adds or not value & have[worker][place]
                        have[worker][place] = value | have[worker][place] if piece.adds else value
                left[worker].popleft()
    assert not any(left)
    return have, sent


@pytest.mark.parametrize("name", ALL_REDUCES)
@settings(deadline=None, max_examples=30)  # no deadline: machines are slow at times
@given(count=st.integers(1, 20), numel=st.integers(0, 60), piece_numel=st.integers(1, 70))
def test_every_number_ends_as_the_sum_of_all_workers(name: str, count: int, numel: int, piece_numel: int) -> None:
    have, _ = play(ALL_REDUCES[name], count, numel, piece_numel)
    assert all(value == frozenset(range(count)) for worker in have for value in worker)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 33])
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_steps_and_bytes_are_those_of_the_closed_form(name: str, count: int) -> None:
    numel = 4 * count  # parts are equal
    _, sent = play(ALL_REDUCES[name], count, numel, numel)
    cost = forms.ALLREDUCE[name](numel, count, 1.0, 0.0)
    # The busiest: a tree's root sends to all its children, others have a parent to send to, too.
    assert max(sent) == pytest.approx(cost.bytes_per_worker)
    assert max(len(ALL_REDUCES[name](worker, count, numel)) for worker in range(count)) <= cost.steps


@pytest.mark.parametrize("count", range(1, 34))
def test_halving_and_doubling_send_no_byte_too_many_and_take_as_few_steps(count: int) -> None:
    numel, least = 4 * count, forms.ideal(4 * count, count, 1.0, 0.0)
    _, sent = play(halving_doubling, count, numel, numel)
    assert sent == [pytest.approx(least.bytes_per_worker)] * count
    assert {len(halving_doubling(worker, count, numel)) for worker in range(count)} == {2 * least.steps}


@pytest.mark.parametrize("schedule", [ring_scatter, halving_scatter])
@settings(deadline=None, max_examples=30)  # no deadline: machines are slow at times
@given(count=st.integers(1, 20), numel=st.integers(0, 60))
def test_a_reduce_scatter_leaves_each_worker_the_sum_of_its_part(schedule: Schedule, count: int, numel: int) -> None:
    have, _ = play(schedule, count, numel, 7)
    for worker in range(count):
        begin, end = part(numel, worker, count)
        assert all(value == frozenset(range(count)) for value in have[worker][begin:end])


@pytest.mark.parametrize("schedule", [ring_gather, doubling_gather])
@settings(deadline=None, max_examples=30)  # no deadline: machines are slow at times
@given(count=st.integers(1, 20), numel=st.integers(0, 60))
def test_an_all_gather_gives_all_workers_each_part(schedule: Schedule, count: int, numel: int) -> None:
    have, _ = play(schedule, count, numel, 7)
    owners = [frozenset([worker]) for worker in range(count) for _ in range(*part(numel, worker, count))]
    assert have == [owners] * count


@pytest.mark.parametrize("make", [broadcast_from, chain_from])
@settings(deadline=None, max_examples=30)  # no deadline: machines are slow at times
@given(count=st.integers(1, 20), data=st.data())
def test_a_broadcast_reaches_everybody_from_any_source(
    make: partial[Schedule], count: int, data: st.DataObject
) -> None:
    source = data.draw(st.integers(0, count - 1))
    have, sent = play(make(source), count, 10, 3)
    assert have == [[frozenset([source])] * 10] * count
    assert sum(sent) == 10 * (count - 1)


def test_a_piece_is_sent_on_before_the_rest_of_the_step_has_arrived() -> None:
    first, second, *_ = compiled(ring, 1, 4, 8, 1)
    assert [(piece.begin, piece.end) for piece in first.sends] == [(0, 1), (1, 2)]
    assert [piece.unlocks for piece in first.receives] == [(piece,) for piece in second.sends]
    assert second.locked == set(second.sends)


def test_a_piece_that_two_messages_make_up_is_not_sent_on_early() -> None:
    def two_into_one(_index: int, _count: int, numel: int) -> list[Step]:
        both = (Message(1, 0, numel, True), Message(2, 0, numel, True))
        return [Step(receives=both), Step(sends=(Message(1, 0, numel),))]

    first, second = compiled(two_into_one, 0, 3, 4, 8)
    assert [piece.unlocks for piece in first.receives] == [(), ()]
    assert second.locked == set()


def test_parts_differ_by_one_at_most_and_spans_go_around_the_end() -> None:
    assert [part(10, index, 4) for index in range(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]
    assert spans(10, 3, 3, 5) == [(6, 10), (0, 2)]
    assert spans(1, 0, 2, 4) == []  # the only number is in the last part

"""A state is brought together from what members hold, bit for bit, in any mesh; or not at all, and that is said."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.shm.kept import Room, open_room
from shoal.fault import exchange_pieces
from shoal.fault.exchange import Offer, StateLost, newest_covered, offer
from shoal.fault.exchange_boxes import Box, cover, overlap_of, without
from shoal.fault.snapshot import Held, Snapshots, held_on_host
from tests.fault.slices import CUTS, Cut, Threads, ThreadWire, emptied, held, slices, whole_state, wrong


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return open_room("test", shared=tmp_path)


def brought(
    holdings: Sequence[Sequence[Held]], cut: Cut, *, rooms: Sequence[Room | None], step: int
) -> tuple[list[Any], Threads]:
    """Let members with these holdings go on in the mesh `cut`; return what is wrong on each."""
    threads = Threads(len(holdings))

    def work(wire: ThreadWire) -> Any:
        offers = offer(holdings[wire.index], wire, rooms[wire.index])
        if offers.newest is None:
            return None
        wanted = emptied(slices(cut, wire.index, whole_state(step))) if wire.index < cut.workers else []
        offers.fill(wanted)
        assert offers.step == step
        return wrong(cut, wire.index, wanted, step=step) if wanted else []

    return threads.run(work), threads


def taken(room: Room, cut: Cut, worker: int, *, step: int, generation: int = 0) -> None:
    """Leave the snapshot of a worker in the room, as one that is dead does."""
    state = held(cut, worker, step=step, generation=generation)
    files = Snapshots(room, generation=generation, worker=worker, part=state.part, parts=state.parts, timeout_s=30.0)
    assert files.prepare(state.shards, {}) == ""
    files.take(state.shards, step, lambda: {"own": state.own, "common": state.common})
    files.wait()
    files.close()


@pytest.mark.parametrize("after", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("before", CUTS.values(), ids=CUTS)
def test_live_states_of_any_mesh_make_those_of_any_other_bit_for_bit(before: Cut, after: Cut) -> None:
    count = max(before.workers, after.workers)
    holdings = [[held(before, index, step=8)] if index < before.workers else [] for index in range(count)]
    answers, _ = brought(holdings, after, rooms=[None] * count, step=8)
    assert answers == [[]] * count


@pytest.mark.parametrize("after", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("before", CUTS.values(), ids=CUTS)
def test_snapshots_of_the_dead_make_those_of_any_mesh_and_nothing_is_sent(before: Cut, after: Cut, room: Room) -> None:
    for worker in range(before.workers):
        taken(room, before, worker, step=8)
    answers, threads = brought([[]] * after.workers, after, rooms=[room] * after.workers, step=8)
    assert answers == [[]] * after.workers
    assert sum(threads.sent) == 0


def test_a_dead_workers_slices_come_from_its_snapshot_and_the_others_from_the_living(room: Room) -> None:
    before, after = Cut(rows=3), Cut(rows=2)
    taken(room, before, 1, step=8)
    answers, _ = brought([[held(before, 0, step=8)], [held(before, 2, step=8)]], after, rooms=[room] * 2, step=8)
    assert answers == [[], []]


def test_between_hosts_slices_are_sent_by_the_first_member_of_the_host_that_has_them(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    rooms = [open_room("test", shared=tmp_path / host) for host in "ab"]
    before, after = Cut(rows=2), Cut(replicate=2)
    for worker, each in enumerate(rooms):
        taken(each, before, worker, step=8)
    answers, threads = brought([[], []], after, rooms=rooms, step=8)
    assert answers == [[], []]
    assert all(threads.sent)


def test_equally_near_holders_share_the_work_for_one_that_joins() -> None:
    before, after = Cut(replicate=3), Cut(replicate=4)
    holdings = [*([held(before, index, step=8)] for index in range(3)), []]
    answers, threads = brought(holdings, after, rooms=[None] * 4, step=8)
    assert answers == [[]] * 4
    assert sum(sent > 0 for sent in threads.sent) > 1


def test_large_slices_travel_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_pieces, "_PIECE_BYTES", 20)
    answers, _ = brought([[held(Cut(), 0, step=8)], []], Cut(replicate=2), rooms=[None] * 2, step=8)
    assert answers == [[], []]


def test_the_highest_complete_step_of_replicas_wins() -> None:
    before = Cut(replicate=2)
    holdings = [[held(before, 0, step=7)], [held(before, 1, step=8)]]
    answers, _ = brought(holdings, before, rooms=[None] * 2, step=8)
    assert answers == [[], []]


def test_all_go_back_to_the_newest_step_that_is_whole(room: Room) -> None:
    before = Cut(rows=2)
    taken(room, before, 0, step=7)  # of a worker that died before it had step 8
    holdings = [[held(before, 1, step=8), held(before, 1, step=7)]]
    answers, _ = brought(holdings, Cut(), rooms=[room], step=7)
    assert answers == [[]]


def test_states_of_two_generations_are_never_mixed() -> None:
    offers = [Offer(0, 9, 0, 0, 2), Offer(1, 9, 1, 1, 2), Offer(0, 8, 0, 0, 2), Offer(0, 8, 1, 1, 2)]
    assert newest_covered(offers) == (0, 8)
    assert newest_covered([*offers, Offer(1, 8, 0, 0, 1)]) == (1, 8)


def test_where_a_part_is_held_by_nobody_nothing_is_covered() -> None:
    before = Cut(rows=3)
    answers, _ = brought([[held(before, 0, step=8)], [held(before, 2, step=8)]], Cut(), rooms=[None] * 2, step=8)
    assert answers == [None, None]
    assert newest_covered([]) is None


def test_a_slice_that_nobody_holds_is_named_to_all_and_nothing_is_filled() -> None:
    state = held(Cut(), 0, step=8)
    state = Held(0, 8, 0, 0, 1, [s for s in state.shards if s.name != "model/in.bias"], {}, {"step": 8})
    threads, wanted = Threads(2), [emptied(slices(Cut(), 0, whole_state(8))) for _ in range(2)]
    wanted[1] = [shard for shard in wanted[1] if shard.name != "model/in.bias"]

    def work(wire: ThreadWire) -> None:
        offer([state] if wire.index == 0 else [], wire, None).fill(wanted[wire.index])

    answers = threads.run(work)
    assert [type(answer) for answer in answers] == [StateLost, StateLost]
    assert "worker 0 lacks 7 numbers of model/in.bias" in str(answers[1])
    assert all(not shard.tensor.any() for shards in wanted for shard in shards)


def test_a_tensor_of_another_shape_or_dtype_is_refused() -> None:
    for replaced in (torch.zeros(9), torch.zeros(7, dtype=torch.float64)):
        state = held(Cut(), 0, step=8)
        wanted = [type(state.shards[0])("model/in.bias", replaced, tuple(replaced.shape), (0,))]

        def work(wire: ThreadWire, state: Held = state, wanted: list[Any] = wanted) -> None:
            offer([state], wire, None).fill(wanted)

        assert isinstance(Threads(1).run(work)[0], StateLost)


def test_what_a_worker_had_for_itself_is_found_by_its_number(room: Room) -> None:
    before = Cut(rows=2)
    taken(room, before, 1, step=8)

    def work(wire: ThreadWire) -> Any:
        offers = offer([held(before, 0, step=8)], wire, room)
        return offers.own(0), offers.own(1), offers.own(2), offers.alike()

    assert Threads(1).run(work) == [({"who": 0}, {"who": 1}, None, {"step": 8, "generation": 0})]
    assert [each.step for each in held_on_host(room)] == [8]


def test_a_box_is_covered_by_parts_of_others_each_number_once() -> None:
    wanted = Box((1, 1), (4, 4))
    sources = [(Box((0, 0), (3, 3)), "a"), (Box((0, 0), (10, 3)), "b"), (Box((2, 2), (9, 9)), "c")]
    parts, lack = cover(wanted, sources)
    marks = torch.zeros(6, 6)
    for box, _ in parts:
        marks[box.offset[0] : box.offset[0] + box.sizes[0], box.offset[1] : box.offset[1] + box.sizes[1]] += 1
    assert marks[1:5, 1:5].sum() == 16 - lack
    assert marks.max() == 1
    assert lack == 2  # row 1, columns 3 and 4
    assert {source for _, source in parts} == {"a", "b", "c"}


def test_boxes_that_do_not_overlap_have_no_overlap() -> None:
    assert overlap_of(Box((0,), (3,)), Box((3,), (3,))) is None
    assert overlap_of(Box((), ()), Box((), ())) == Box((), ())
    assert without(Box((), ()), Box((), ())) == []
    assert without(Box((0,), (5,)), Box((1,), (2,))) == [Box((0,), (1,)), Box((3,), (2,))]

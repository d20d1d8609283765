"""A state that outgrows the room of its snapshots, and a worker that keeps none any more: nothing is lost meanwhile."""

from pathlib import Path

import pytest
import torch

from shoal.comm.shm.kept import Room, open_room
from shoal.fault.shards import Shard, whole_shard
from shoal.fault.snapshot import Snapshots, held_on_host
from shoal.fault.snapshot_place import NoneKept
from tests.fault.test_snapshot import opened, state, take


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return open_room("test", shared=tmp_path)


def grown(step: int) -> list[Shard]:
    """The state after an optimizer has begun to keep something for one more parameter."""
    return [*state(step), whole_shard("optimizer/exp_avg/late", torch.full((7,), float(step)))]


def take_grown(files: Snapshots, step: int) -> None:
    files.take(grown(step), step, lambda: {"own": {"step": step}, "common": {}})
    files.wait()


def test_a_state_that_outgrows_its_room_gets_another_and_nothing_is_lost_meanwhile(room: Room) -> None:
    files = opened(room)
    take(files, 1)
    take(files, 2)
    take_grown(files, 3)
    assert sorted(held.step for held in held_on_host(room)) == [1, 2, 3], "others may have no newer one than 2"
    take_grown(files, 4)
    take_grown(files, 5)
    found = held_on_host(room)
    assert sorted(held.step for held in found) == [4, 5]
    for held in found:
        numbers = {shard.name: shard.tensor for shard in held.shards}
        assert all(torch.equal(numbers.pop(shard.name), shard.tensor) for shard in grown(held.step))
        assert not numbers
    files.close(removes=True)
    assert list(room.path.glob("*.snapshot")) == []


def test_those_who_wait_for_one_whose_state_has_outgrown_its_room_find_it(room: Room) -> None:
    first, second = opened(room, 0), opened(room, 1)
    for files in (first, second):
        files.meet([0, 1])
        take(files, 1)
    take_grown(second, 2)
    take_grown(second, 3)
    take(first, 2)
    take(first, 3)  # written over 1: the other one has 2, in its second room
    assert sorted((h.worker, h.step) for h in held_on_host(room)) == [(0, 2), (0, 3), (1, 1), (1, 2), (1, 3)]
    take_grown(second, 4)
    assert sorted((h.worker, h.step) for h in held_on_host(room)) == [(0, 2), (0, 3), (1, 3), (1, 4)]
    first.close()
    second.close()


def test_text_that_outgrows_its_room_gets_another(room: Room) -> None:
    files = opened(room)
    take(files, 1)
    text = {"own": {"x": "y" * 100_000}, "common": {}}
    files.take(state(2), 2, lambda: text)
    files.wait()
    assert {held.step: held.own for held in held_on_host(room)} == {1: {"step": 1}, 2: text["own"]}
    files.close()


def test_who_waits_for_one_that_keeps_none_any_more_is_told(room: Room) -> None:
    first, second = opened(room, 0), opened(room, 1)
    for files in (first, second):
        files.meet([0, 1])
        take(files, 1)
    take(first, 2)
    second.close(removes=True)
    with pytest.raises(NoneKept, match="worker 1 keeps no snapshots any more"):
        take(first, 3)
    first.close()

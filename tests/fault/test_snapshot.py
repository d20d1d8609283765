"""A worker's last complete state outlives it: whole or not there, and removed when nobody needs it."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.shm import kept
from shoal.comm.shm.kept import Room, open_room
from shoal.fault.shards import Shard, whole_shard
from shoal.fault.snapshot import Held, Snapshots, held_on_host
from shoal.fault.snapshot_file import SnapshotFile, SnapshotReader, lay_out
from shoal.fault.snapshot_place import path_of, remove_older
from tests.fault.slices import Cut, slices, whole_state
from tests.support.waiting import wait_until

_TIMEOUT_S = 60.0


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return open_room("test", shared=tmp_path)


def opened(room: Room, worker: int = 0, shards: list[Shard] | None = None, **more: Any) -> Snapshots:
    made = Snapshots(room, generation=0, worker=worker, part=worker, parts=2, timeout_s=_TIMEOUT_S, **more)
    assert made.prepare(shards if shards is not None else state(0), {}) == ""
    return made


def state(step: int) -> list[Shard]:
    return slices(Cut(), 0, whole_state(step))


def take(files: Snapshots, step: int) -> None:
    files.take(state(step), step, lambda: {"own": {"step": step}, "common": {}})
    files.wait()


def is_state(held: Held) -> bool:
    expected = {shard.name: shard.tensor for shard in state(held.step)}
    return held.own == {"step": held.step} and all(torch.equal(s.tensor, expected[s.name]) for s in held.shards)


def test_the_last_two_states_are_there_bit_for_bit(room: Room) -> None:
    files = opened(room)
    for step in range(1, 6):
        take(files, step)
        found = held_on_host(room)
        assert sorted(held.step for held in found) == ([1] if step == 1 else [step - 1, step])
        assert all(map(is_state, found))
    files.close()
    assert sorted(held.step for held in held_on_host(room)) == [4, 5]
    files.close(removes=True)


def mapped_snapshots(room: Room) -> int:
    return Path("/proc/self/maps").read_text().count(str(room.path))


def test_who_counts_memory_is_told_before_room_is_mapped_and_when_it_is_no_more(room: Room) -> None:
    told: list[tuple[int, int]] = []
    files = opened(room, on_room=lambda num_bytes: told.append((num_bytes, mapped_snapshots(room))))
    assert told == [(files.num_bytes, 0)]
    take(files, 1)
    assert mapped_snapshots(room) == 1
    files.close(removes=True)
    assert told[1:] == [(0, 0)]


def test_tensors_that_are_not_in_a_row_are_copied_too(room: Room) -> None:
    weight = torch.arange(12.0).view(3, 4)
    shards = [
        whole_shard("plain", torch.arange(100_000.0)),
        whole_shard("columns", weight.t()),
        whole_shard("x", weight[:, 1]),
    ]
    files = opened(room, shards=shards)
    files.take(shards, 1, lambda: {"own": {}, "common": {}})
    files.wait()
    (held,) = held_on_host(room)
    found = {shard.name: shard.tensor for shard in held.shards}
    assert all(torch.equal(found[shard.name], shard.tensor) for shard in shards)
    files.close()


def test_a_half_made_copy_counts_for_nothing(room: Room) -> None:
    files = opened(room)
    take(files, 1)
    take(files, 2)
    assert files._file is not None
    files._file.begin(files._file.steps().index(1))
    assert [held.step for held in held_on_host(room)] == [2]
    files.close()


def test_a_byte_that_is_not_what_was_copied_makes_a_copy_count_for_nothing(room: Room) -> None:
    files = opened(room)
    take(files, 1)
    take(files, 2)
    assert files._file is not None
    files._file.places[files._file.steps().index(2)][0].view(-1).view(torch.uint8)[0] ^= 1
    assert [held.step for held in held_on_host(room)] == [1]
    files.close()


def test_what_is_no_snapshot_is_passed_over(room: Room) -> None:
    files = opened(room)
    take(files, 1)
    path = next(room.path.glob("*.snapshot"))
    for number, content in enumerate([b"", b"x" * 5000, path.read_bytes()[:-4096], b"\0" * 8192]):
        path_of(room, 0, number + 1).write_bytes(content)
    assert [held.step for held in held_on_host(room)] == [1]
    files.close()


def test_a_file_is_there_whole_or_not_at_all(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    files = Snapshots(room, generation=0, worker=3, part=0, parts=1, timeout_s=_TIMEOUT_S)
    why = files.prepare(state(0), {})
    assert "worker 3 has no room for its snapshots" in why
    assert "No space left" in why
    assert sorted(path.name for path in room.path.iterdir()) == ["id", "lock", "making"]
    files.close()


def test_memory_that_is_too_small_is_told_before_any_is_taken(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "free_bytes", lambda _: 1000)
    files = Snapshots(room, generation=0, worker=0, part=0, parts=1, timeout_s=_TIMEOUT_S)
    assert "can be used" in files.prepare(state(0), {})
    files.close()


def test_memory_is_taken_by_one_at_a_time(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_ALONE_S", 0.05)
    with room.alone(), pytest.raises(OSError, match="temporarily unavailable"), room.alone():
        pass
    with room.alone():
        pass


def test_a_slot_is_written_over_only_when_all_have_a_newer_step(room: Room) -> None:
    first, second = opened(room, 0), opened(room, 1)
    for files in (first, second):
        files.meet([0, 1])
        take(files, 1)
    take(first, 2)
    first.take(state(3), 3, lambda: {"own": {}, "common": {}})  # wants the slot of 1; the second one has no 2 yet
    assert not first._is_done.wait(0.05)
    assert sorted((held.worker, held.step) for held in held_on_host(room)) == [(0, 1), (0, 2), (1, 1)]
    take(second, 2)
    first.wait()
    assert sorted((held.worker, held.step) for held in held_on_host(room)) == [(0, 2), (0, 3), (1, 1), (1, 2)]
    first.close()
    second.close()


def test_who_waits_for_a_dead_one_gives_up_when_closed_and_keeps_what_it_has(room: Room) -> None:
    lost = threading.Event()

    def check() -> None:
        if lost.is_set():
            raise RuntimeError("worker 1 is dead")

    first, second = opened(room, 0, check=check), opened(room, 1)
    for files in (first, second):
        files.meet([0, 1])
        take(files, 1)
    second.close()
    take(first, 2)
    first.take(state(3), 3, lambda: {"own": {}, "common": {}})
    lost.set()
    with pytest.raises(RuntimeError, match="worker 1 is dead"):
        first.wait()
    first.close()
    assert sorted((held.worker, held.step) for held in held_on_host(room)) == [(0, 1), (0, 2), (1, 1)]


def test_files_of_older_generations_are_removed(room: Room) -> None:
    for generation in range(3):
        SnapshotFile(path_of(room, generation, 0), lay_out(state(0), {}, text_bytes=100))
    remove_older(room, 2)
    assert list(room.path.glob("*.snapshot")) == [path_of(room, 2, 0)]


_KILLED = """
import sys
from pathlib import Path
from shoal.comm.shm.kept import open_room
from shoal.comm.shm.sweeper import Sweeper
from tests.fault.test_snapshot import opened, state, take
room = open_room("killed", shared=Path(sys.argv[1]))
files = opened(room)
take(files, 1)
take(files, 2)
print("taken", flush=True)
sys.stdin.read()
"""


def test_after_sigkill_the_state_is_there_for_the_run_and_gone_with_the_next(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "taken\n"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(_TIMEOUT_S)
    room = open_room("killed", shared=tmp_path)  # another process of the same run
    assert sorted(held.step for held in held_on_host(room)) == [1, 2]
    assert all(map(is_state, held_on_host(room)))
    room.close()
    open_room("another", shared=tmp_path).close()
    assert [path.name for path in tmp_path.iterdir()] == [f"shoal-room-{os.geteuid()}-another"]


def test_when_all_are_killed_the_room_goes_without_another_run(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _KILLED.replace("files =", "Sweeper(room.path)\nfiles ="), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "taken\n"
            room = open_room("killed", shared=tmp_path)
            assert held_on_host(room), "as long as anybody lives"
            room.close()
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(_TIMEOUT_S)
    wait_until(lambda: list(tmp_path.iterdir()) == [])


def test_a_reader_of_a_removed_file_still_reads_it(room: Room) -> None:
    files = opened(room)
    take(files, 1)
    reader = SnapshotReader(next(room.path.glob("*.snapshot")))
    files.close()
    remove_older(room, 1)
    assert [slot.step for slot in reader.complete()] == [1]

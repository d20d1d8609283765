"""A worker's snapshots are on another host as well, whole or not counted, and no harm is done where they cannot be."""

import contextlib
import functools
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.shm.kept import Room, open_room
from shoal.fault.snapshot import held_on_host
from shoal.fault.snapshot_file import SnapshotFile
from shoal.fault.snapshot_neighbour import Address, Receiver, neighbours
from shoal.fault.snapshot_place import path_of
from tests.fault.test_snapshot import is_state, opened, take
from tests.fault.test_snapshot_outgrown import take_grown
from tests.support.waiting import wait_until

_TIMEOUT_S = 30.0


@pytest.fixture
def hosts(tmp_path: Path) -> list[Room]:
    """The rooms of two hosts."""
    for host in "ab":
        (tmp_path / host).mkdir()
    return [open_room("test", shared=tmp_path / host) for host in "ab"]


@pytest.fixture
def receiver(hosts: list[Room]) -> Iterator[Receiver]:
    made = receiving(hosts[1])
    yield made
    made.close()


def receiving(room: Room, *, timeout_s: float = _TIMEOUT_S) -> Receiver:
    return Receiver(room, "127.0.0.1", functools.partial(path_of, room), timeout_s=timeout_s)


def steps_at(room: Room) -> list[int]:
    return sorted(held.step for held in held_on_host(room))


def test_the_last_two_snapshots_are_on_the_other_host_bit_for_bit(hosts: list[Room], receiver: Receiver) -> None:
    files = opened(hosts[0])
    assert files.send_to(receiver.address) == ""
    for step in range(1, 6):
        take(files, step)
        assert files.wait_delivered() == ""
        assert steps_at(hosts[1]) == ([1] if step == 1 else [step - 1, step])
        assert all(map(is_state, held_on_host(hosts[1])))
    files.close(removes=True)
    assert steps_at(hosts[0]) == []
    assert steps_at(hosts[1]) == [4, 5]
    receiver.close(removes=True)
    assert steps_at(hosts[1]) == []


def test_a_copy_that_came_half_counts_for_nothing(hosts: list[Room], receiver: Receiver) -> None:
    files = opened(hosts[0])
    assert files.send_to(receiver.address) == ""
    take(files, 1)
    files.wait_delivered()
    assert files._sender is not None
    link = files._sender._link
    assert link is not None
    link.sendall(struct.pack("<4q", 2, 0, 0, files._file.layout.slot_bytes if files._file else 0) + b"half of it")
    files.close()
    assert steps_at(hosts[1]) == [1]


def test_copies_of_a_state_that_has_outgrown_its_room_go_on(hosts: list[Room], receiver: Receiver) -> None:
    files = opened(hosts[0])
    assert files.send_to(receiver.address) == ""
    take(files, 1)
    assert files.wait_delivered() == ""
    for step in (2, 3):
        take_grown(files, step)
        assert files.wait_delivered() == ""
        assert steps_at(hosts[1]) == ([1, 2] if step == 2 else [2, 3])
    files.close()
    receiver.close(removes=True)
    assert steps_at(hosts[1]) == []


def test_one_that_stops_in_the_middle_of_a_copy_is_given_up(hosts: list[Room]) -> None:
    receiver, files = receiving(hosts[1], timeout_s=0.1), opened(hosts[0])
    assert files.send_to(receiver.address) == ""
    assert files._sender is not None
    assert files._file is not None
    link = files._sender._link
    assert link is not None
    link.sendall(struct.pack("<4q", 2, 0, 0, files._file.layout.slot_bytes) + b"half of it")
    assert link.recv(1) == b"", "the other end has closed it"
    files.close()
    receiver.close()


def test_copies_may_be_as_seldom_as_they_like(hosts: list[Room], monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    receive = socket.socket.recv

    def counted(link: socket.socket, *arguments: int) -> bytes:
        try:
            return receive(link, *arguments)
        except TimeoutError:
            waits.append(link)
            raise

    monkeypatch.setattr(socket.socket, "recv", counted)
    receiver, files = receiving(hosts[1], timeout_s=1.0), opened(hosts[0])
    assert files.send_to(receiver.address) == ""
    wait_until(lambda: bool(waits))
    take(files, 1)
    assert files.wait_delivered() == ""
    assert steps_at(hosts[1]) == [1]
    files.close()
    receiver.close()


def test_a_copy_that_arrives_damaged_is_refused_and_that_is_said(
    hosts: list[Room], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(hosts[0])
    assert files.send_to(receiver.address) == ""
    line = SnapshotFile.line

    def lying(self: SnapshotFile, slot: int) -> tuple[int, int, int]:
        step, total, text_bytes = line(self, slot)
        return step, total ^ 1, text_bytes

    monkeypatch.setattr(SnapshotFile, "line", lying)
    take(files, 1)
    assert "damaged" in files.wait_delivered()
    assert steps_at(hosts[1]) == []
    assert steps_at(hosts[0]) == [1]
    files.close()


def test_without_memory_on_the_other_host_that_is_said(
    hosts: list[Room], receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(hosts[0])
    monkeypatch.setattr(Room, "free_bytes", lambda _: 1000)
    assert "can be used" in files.send_to(receiver.address)
    take(files, 1)
    assert "can be used" in files.wait_delivered()
    assert steps_at(hosts[0]) == [1]
    files.close()


def test_who_does_not_know_the_secret_gets_no_file(hosts: list[Room], receiver: Receiver) -> None:
    files = opened(hosts[0])
    address: Any = receiver.address
    assert "cannot be reached" in files.send_to(Address(address.host, address.port, "0" * 32))
    assert list(hosts[1].path.glob("*.snapshot")) == []
    files.close()
    stranger = socket.create_connection((address.host, address.port), timeout=_TIMEOUT_S)
    with stranger, contextlib.suppress(ConnectionResetError):
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 10)
        assert stranger.recv(1) == b""
    assert list(hosts[1].path.glob("*.snapshot")) == []


def test_a_neighbour_that_goes_is_told_and_the_own_snapshots_go_on(hosts: list[Room], receiver: Receiver) -> None:
    files = opened(hosts[0])
    assert files.send_to(receiver.address) == ""
    take(files, 1)
    files.wait_delivered()
    receiver.close()
    take(files, 2)
    assert "gone" in files.wait_delivered()
    take(files, 3)
    assert "gone" in files.wait_delivered()
    assert steps_at(hosts[0]) == [2, 3]
    assert steps_at(hosts[1]) == [1]
    files.close()


def test_a_neighbour_that_cannot_be_reached_is_told(hosts: list[Room]) -> None:
    files = opened(hosts[0])
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert "cannot be reached" in files.send_to(Address("127.0.0.1", port, "x"))
    files.close()


@pytest.mark.parametrize(
    ("rooms", "expected"),
    [
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 2, 3, 0]),
        ("abc", [1, 2, 0]),
        ("aaab", [3, 3, 3, 0]),
        ("aa", [None, None]),
        ("a", [None]),
    ],
)
def test_neighbours_are_on_other_hosts_and_spread_over_them(rooms: str, expected: list[int | None]) -> None:
    assert neighbours(list(rooms)) == expected

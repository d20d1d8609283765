"""Several nodes: one reads the source, the others pass it on; lost nodes and wrong bytes in between.

The nodes are Staging objects of this process, each with its own folder and desk, over a real store and real sockets. On
hosts of their own: tests/data/stage/test_hosts.py.
"""

import contextlib
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.store import host_store
from shoal.core.errors import DataError
from shoal.data.pack.manifest import NAME
from shoal.data.stage.agent import Staging
from shoal.data.stage.ask import Neighbour
from shoal.data.stage.copies import pack_id
from shoal.data.stage.peers import Peers
from shoal.data.stage.staging import stage
from tests.data.stage.file_server import FileServer, serving
from tests.data.stage.packs import differing, make_pack

TIMEOUT_S = 60.0
BIG = 3_000_000


class Nodes:
    """Nodes that stage `source/a.pack` by way of a file server and one store."""

    def __init__(self, folder: Path, opened: ExitStack, *, part_bytes: int, num_parts: int = 3) -> None:
        self.folder, self._opened = folder, opened
        self.pack = folder / "source" / "a.pack"
        make_pack(self.pack, part_bytes=part_bytes, num_parts=num_parts)
        self.server: FileServer = opened.enter_context(serving(folder / "source"))
        self.store, _ = host_store(host="127.0.0.1", timeout_s=TIMEOUT_S)
        self.nodes: list[Staging] = []

    def add(self, **options: Any) -> Staging:
        """Start one more node, and return it once it has joined the chain."""
        home = self.folder / f"node{len(self.nodes)}"
        options = {"to": home, "desk": home / "desk", "store": self.store, **options}
        staged = stage(f"{self.server.url}/a.pack", **options)
        assert isinstance(staged, Staging)
        self._opened.callback(staged.close)
        self.nodes.append(staged)
        self.joined(staged)
        return staged

    def joined(self, staged: Staging) -> None:
        """Return when `staged` has its place, so that the order of the nodes is that of `add`."""
        for _ in range(6000):
            if staged._peers is not None and staged._peers.number >= 0:
                return
            threading.Event().wait(0.01)
        raise AssertionError("it has not joined")

    def wait(self, *nodes: Staging) -> None:
        for node in nodes or self.nodes:
            node.wait(timeout_s=TIMEOUT_S)
            assert differing(node.path, self.pack) == []

    @property
    def reads(self) -> dict[str, float]:
        """How often each part was read from the source, by its size."""
        size = {f"a.pack/parts/{path.name}": path.stat().st_size for path in (self.pack / "parts").iterdir()}
        return {name[-11:-6]: self.server.read_bytes[name] / size[name] for name in sorted(size)}


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Nodes]:
    with ExitStack() as opened:
        yield Nodes(tmp_path, opened, part_bytes=50_000)


@pytest.fixture
def big(tmp_path: Path) -> Iterator[Nodes]:
    """Parts of several pieces, so that there is a middle."""
    with ExitStack() as opened:
        yield Nodes(tmp_path, opened, part_bytes=BIG)


@pytest.mark.parametrize("fan_out", [1, 2])
def test_four_nodes_have_all_parts_and_the_source_was_read_once(small: Nodes, fan_out: int) -> None:
    nodes = [small.add(fan_out=fan_out) for _ in range(4)]
    small.wait()
    assert small.reads == {"00000": 1, "00001": 1, "00002": 1}
    total = sum(path.stat().st_size for path in (small.pack / "parts").iterdir())
    assert [node.report()["source_bytes"] for node in nodes] == [total, 0, 0, 0]
    assert [node.report()["neighbour_bytes"] for node in nodes] == [0, total, total, total]
    sent = {1: [total, total, total, 0], 2: [2 * total, total, 0, 0]}[fan_out]
    assert [node.report()["sent_bytes"] for node in nodes] == sent


def test_a_part_is_passed_on_before_all_of_it_is_there(big: Nodes) -> None:
    gate = big.server.gates.setdefault("a.pack/parts/00000.arrow", threading.Event())
    nodes = [big.add() for _ in range(3)]
    assert big.server.reached.wait(TIMEOUT_S)
    last = nodes[-1]._fetcher
    assert last is not None
    offer = last.arrivals.offer("parts/00000.arrow", turn=None, sent_bytes=BIG // 3, timeout_s=TIMEOUT_S)
    assert offer is not None
    assert not offer.is_whole
    assert last.counts.neighbour_bytes < BIG
    gate.set()
    big.wait()


def test_a_node_in_the_middle_is_lost_in_the_middle_of_a_part_and_the_others_finish(big: Nodes) -> None:
    gate = big.server.gates.setdefault("a.pack/parts/00001.arrow", threading.Event())
    first, lost, *others = [big.add() for _ in range(4)]
    assert big.server.reached.wait(TIMEOUT_S)
    lost.close()
    gate.set()
    big.wait(first, *others)
    assert big.reads == {"00000": 1, "00001": 1, "00002": 1}
    assert others[0].report()["refetched"] >= 1


def test_the_node_that_reads_the_source_is_lost_and_the_next_one_reads_on(big: Nodes) -> None:
    gate = big.server.gates.setdefault("a.pack/parts/00001.arrow", threading.Event())
    lost, *others = [big.add() for _ in range(3)]
    assert big.server.reached.wait(TIMEOUT_S)
    gate.set()
    lost.close()
    big.wait(*others)
    assert big.reads["00000"] == 1
    assert others[1].report()["source_bytes"] == 0


def test_a_part_that_the_source_sends_wrong_once_is_read_again_once_for_all(big: Nodes) -> None:
    big.server.wrong["a.pack/parts/00001.arrow"] = 1
    nodes = [big.add() for _ in range(3)]
    big.wait()
    assert round(big.reads["00001"]) == 2  # both times by the first node: the others saw it begin again
    assert [node.report()["source_bytes"] > 0 for node in nodes] == [True, False, False]


def test_a_part_that_is_wrong_at_the_source_is_named_and_the_others_come(small: Nodes) -> None:
    small.server.wrong["a.pack/parts/00001.arrow"] = 1000
    nodes = [small.add() for _ in range(2)]
    for node in nodes:
        assert node.path_of(2) == node.path
        with pytest.raises(
            DataError, match=r"parts/00001.arrow of http.* is not what its manifest says: checksum \w+ ins"
        ):
            node.path_of(1)
        assert node.have() == [0, 2]


class Liar:
    """A node that joins the chain first, and answers with what it is told to."""

    def __init__(self, nodes: Nodes, says: bytes) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(TIMEOUT_S)
        self._says = says
        self.asked = 0
        peers = Peers(nodes.store, pack_id((nodes.pack / NAME).read_bytes()))
        peers.join(host="liar", address=self._listener.getsockname(), parts=[0, 1, 2])
        threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.asked += 1
            with connection, contextlib.suppress(OSError):
                connection.sendall(bytes(16) + self._says)
                connection.settimeout(TIMEOUT_S)
                while connection.recv(1 << 16):
                    pass

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize(
    ("says", "asked"),
    [
        (b"d" + (5).to_bytes(8, "big") + b"wrong" + b"e" + bytes(8), 6),  # twice for each part, then the source
        (b"d" + (10**18).to_bytes(8, "big") + bytes(1 << 20), 6),
        (b"n" + bytes(8), 3),
        (b"?" + bytes(8), 1),
        (b"x", 1),
    ],
    ids=["wrong bytes", "too many bytes", "no", "nonsense", "half a frame"],
)
def test_a_neighbour_that_is_wrong_is_given_up_for_the_source(
    small: Nodes, monkeypatch: pytest.MonkeyPatch, says: bytes, asked: int
) -> None:
    monkeypatch.setattr("shoal.data.stage.ask.SILENT_S", 0.3)
    liar = Liar(small, says)
    small.add()
    small.wait()
    liar.close()
    assert small.reads == {"00000": 1, "00001": 1, "00002": 1}
    assert liar.asked == asked


def test_who_does_not_know_the_token_gets_nothing(small: Nodes) -> None:
    node = small.add()
    small.wait()
    assert node._server is not None
    with Neighbour(node._server.address, b"guessed") as stranger, pytest.raises(ConnectionError):
        stranger.who_has()
    assert node.report()["sent_bytes"] == 0


def test_everyone_can_ask_who_has_what(small: Nodes) -> None:
    nodes = [small.add(), small.add()]
    small.wait()
    for node in nodes:
        for _ in range(1000):  # the last part is told a moment after it is here
            has = [(each["number"], each["has"]) for each in node.who_has()]
            if has == [(0, [0, 1, 2]), (1, [0, 1, 2])]:
                break
            threading.Event().wait(0.01)
        assert has == [(0, [0, 1, 2]), (1, [0, 1, 2])]


def test_nodes_that_want_different_parts_get_theirs_and_each_is_read_once(tmp_path: Path) -> None:
    with ExitStack() as opened:
        nodes = Nodes(tmp_path, opened, part_bytes=50_000, num_parts=4)
        room = sum((nodes.pack / "parts" / f"{part:05d}.arrow").stat().st_size for part in (2, 3)) + 10
        monkey = opened.enter_context(pytest.MonkeyPatch.context())
        monkey.setattr("shoal.data.stage.tiers.room", lambda *_, **__: room)
        first, second = nodes.add(parts=[0, 1]), nodes.add(parts=[2, 1])
        for node, parts in ((first, [0, 1]), (second, [1, 2])):
            for part in parts:
                node.path_of(part)
            assert node.have() == parts
        assert nodes.reads == {"00000": 1, "00001": 1, "00002": 1, "00003": 0}
        with pytest.raises(DataError, match=r"parts/00003.arrow of http.* did not fit"):
            first.path_of(3)


def test_a_node_that_comes_late_gets_all_from_the_others(small: Nodes) -> None:
    small.add()
    small.wait()
    late = small.add()
    small.wait()
    assert late.report()["source_bytes"] == 0
    assert set(small.reads.values()) == {1}

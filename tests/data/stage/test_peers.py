"""Who is asked for a part: those who joined before, also while they are just joining."""

import threading

import pytest
from torch.distributed import HashStore

from shoal.data.stage import peers as peers_module
from shoal.data.stage.peers import Peers
from tests.support.waiting import wait_until

TIMEOUT_S = 30.0


class Held:
    """A store on which nothing is written until it is let go."""

    def __init__(self, store: HashStore) -> None:
        self._store = store
        self.add, self.get, self.check, self.compare_set = store.add, store.get, store.check, store.compare_set
        self.asked, self.let_go = threading.Event(), threading.Event()

    def set(self, key: str, value: str, /) -> None:
        self.asked.set()
        assert self.let_go.wait(TIMEOUT_S)
        self._store.set(key, value)


def joined(peers: Peers) -> Peers:
    peers.join(host="a", address=("127.0.0.1", 1), parts=[0, 1])
    return peers


def test_one_that_joins_waits_for_the_word_of_those_before_it() -> None:
    store = HashStore()
    held = Held(store)
    first, second = Peers(held, "pack"), Peers(store, "pack")
    threads = [threading.Thread(target=joined, args=[first])]
    threads[0].start()
    assert held.asked.wait(TIMEOUT_S)  # it has its number, and nobody knows where it is
    threads.append(threading.Thread(target=joined, args=[second]))
    threads[1].start()
    wait_until(lambda: second.number >= 0)
    assert threads[1].is_alive()
    held.let_go.set()
    for thread in threads:
        thread.join(TIMEOUT_S)
    assert (first.number, second.number) == (0, 1)
    assert [peer.number for peer in second.before(0)] == [0]
    assert first.before(0) == []


def test_one_that_ended_while_it_joined_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "_JOINING_S", 0.05)
    store = HashStore()
    store.add("stage/pack/joined", 1)
    alone = joined(Peers(store, "pack"))
    assert (alone.number, alone.before(0)) == (1, [])

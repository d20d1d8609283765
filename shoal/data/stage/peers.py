"""The nodes that stage a pack together, by way of the rendezvous store: who they are, whom to ask, who has what.

1. A node joins by adding one to a counter: its number is its place in the chain. Whoever comes first reads the source;
   the others wait until those before them have said where they are.
2. Node n gets each part from the node before it that wants the part, too; with `fan_out` f, from its parent in the
   tree in which every node has f children. If that one is gone, from another before it; without any, from the source.
   Nobody asks a later one, so nodes never wait for each other in a ring. A node that starts again joins at the end.
3. Each node writes what it has into the store, and anyone can read that.

Why a chain: a link carries as much in as out at the same time. So node 1 sends to node 2 what it gets from node 0 as it
comes, and n nodes have s bytes after s/b and n pieces. With two children each piece leaves a node twice: 2 s/b.

Example: nodes 0 to 3, fan_out 1: 0 reads the source, 1 asks 0, 2 asks 1, 3 asks 2. Node 1 dies at part 5: 2 gets no
more, asks 0 for part 5 from its beginning, and passes it on to 3. If 0 dies as well, 2 reads the source.
"""

import contextlib
import json
import secrets
import time
from dataclasses import dataclass
from typing import Any, Protocol

from shoal.comm.reach import address_towards

_ASK_AGAIN_S = 30.0
"""How long a node is not asked again that was silent."""
_JOINING_S, _LOOK_S = 5.0, 0.01
"""How long, and how often, a node that joins looks for those before it; one may have ended before it said anything."""


class Store(Protocol):
    """What is needed of a torch.distributed.Store."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a number, and return it."""

    def set(self, key: str, value: str, /) -> None:
        """Write a value."""

    def get(self, key: str, /) -> bytes:
        """Return a value, waiting for it."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all are there."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write `desired` where `expected` is; return what is there then."""


@dataclass(frozen=True)
class Peer:
    """Another node."""

    number: int
    host: str
    address: tuple[str, int]
    parts: frozenset[int]
    """Those that it has, or will have."""


class Peers:
    """This node among those that stage the pack `pack_id`. One thread uses it at a time, but for `everyone`."""

    def __init__(self, store: Store, pack_id: str, *, fan_out: int = 1) -> None:
        self._store, self._prefix, self._fan_out = store, f"stage/{pack_id}", fan_out
        self._known: dict[int, Peer] = {}
        self._silent_until_s: dict[int, float] = {}
        self.number = -1
        ours = secrets.token_hex(16)
        said = store.compare_set(f"{self._prefix}/token", "", ours)
        self.token = said or ours.encode()

    def join(self, *, host: str, address: tuple[str, int], parts: list[int]) -> None:
        """Become the next node of the chain, whose server is at `address`."""
        self.number = int(self._store.add(f"{self._prefix}/joined", 1)) - 1
        about = {"host": host, "address": address, "parts": parts}
        self._store.set(f"{self._prefix}/node/{self.number}", json.dumps(about))
        with contextlib.suppress(RuntimeError):  # a store that is gone is noticed by whoever needs it
            self._await_earlier()

    def _await_earlier(self) -> None:
        """Wait for those who have a smaller number: one that knew none of them would read the source itself."""
        earlier = [f"{self._prefix}/node/{number}" for number in range(self.number)]
        end_s = time.monotonic() + _JOINING_S
        while earlier and not self._store.check(earlier) and time.monotonic() < end_s:
            time.sleep(_LOOK_S)

    def before(self, part: int) -> list[Peer]:
        """Return the nodes to ask for `part`, best first: those that joined before, want it, and were not silent."""
        self._look()
        holders = [peer for number, peer in sorted(self._known.items()) if part in peer.parts and number < self.number]
        if not holders:
            return []
        parent = holders.pop((len(holders) - 1) // self._fan_out)
        now_s = time.monotonic()
        asked = [parent, *reversed(holders)]
        return [peer for peer in asked if self._silent_until_s.get(peer.number, 0.0) < now_s]

    def silent(self, peer: Peer, *, is_gone: bool) -> None:
        """Take note that `peer` did not answer; `is_gone` if nobody is there at all."""
        self._silent_until_s[peer.number] = float("inf") if is_gone else time.monotonic() + _ASK_AGAIN_S

    def tell(self, parts: list[int], *, read_bytes: int) -> None:
        """Write into the store which parts this node has, and how much it has read from the source."""
        with contextlib.suppress(RuntimeError):  # a store that is gone does not stop us
            self._store.set(f"{self._prefix}/has/{self.number}", json.dumps({"parts": parts, "read_bytes": read_bytes}))

    def everyone(self) -> list[dict[str, Any]]:
        """Return for each node its number, host, the parts that it wants and has, and what it read from the source."""
        self._look()
        found = []
        for number, peer in sorted(self._known.items()):
            said: dict[str, Any] = self._read(f"has/{number}") or {"parts": [], "read_bytes": 0}
            about = {"number": number, "host": peer.host, "wants": len(peer.parts)}
            found.append({**about, "has": said["parts"], "read_bytes": said["read_bytes"]})
        return found

    def _look(self) -> None:
        """Learn of those who have joined."""
        try:
            count = int(self._store.add(f"{self._prefix}/joined", 0))
        except RuntimeError:  # the store is gone: go on with those that we know
            return
        for number in range(count):
            if number not in self._known and (about := self._read(f"node/{number}")) is not None:
                host, port = about["address"]
                self._known[number] = Peer(number, about["host"], (host, port), frozenset(about["parts"]))

    def _read(self, key: str) -> Any:
        try:
            path = f"{self._prefix}/{key}"
            return json.loads(self._store.get(path)) if self._store.check([path]) else None
        except RuntimeError:
            return None


def address_of_store(store: Any) -> str:
    """Return this host's address on the way to `store`, or loopback where the store is on this host alone."""
    inner = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    host, port = getattr(inner, "host", ""), getattr(inner, "port", 0)
    return (address_towards(host, port) if host else "") or "127.0.0.1"

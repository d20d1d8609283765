"""Bringing a training state together from what the members of a new generation hold: in memory, in any mesh.

1. The members say what complete states they hold: their own, live; and, the first member of each host, the snapshots in
   that host's memory, of the living and the dead. All take the newest that is whole (`newest_covered`).
2. For that one, they say which slices they hold, and where.
3. Each works out where each slice that it wants comes from: its own memory, a file of its host, a member of its host, a
   member elsewhere; holders that are equally near take turns. It tells the holders. If anything is missing anywhere,
   all learn it now, and nothing is changed.
4. The slices are sent, in pieces, and filled in.

Example: 3 workers with 2 of 6 rows each (ZeRO), worker 1 is killed after step 8. Workers 0 and 2 go on, with 3 rows
each. Files of all three are in the host's memory. Worker 0 takes rows 0, 1 of the first and row 2 of the second;
nothing is sent.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.comm.messages import Wire, gather_values
from shoal.comm.shm.kept import Room
from shoal.core.errors import ShoalError
from shoal.fault.checkpoint.file_format import DTYPES, NAMES
from shoal.fault.exchange_boxes import Box, cover, view_of
from shoal.fault.exchange_pieces import packed, pieces_of, unpack
from shoal.fault.shards import Found, Shard
from shoal.fault.snapshot import LIVE, Held, held_on_host
from shoal.fault.snapshot_file import SnapshotReader

_MOST_NAMED = 3


class StateLost(ShoalError):
    """What the workers still hold does not make up a whole state."""


class Offer(NamedTuple):
    """A complete state that a member can give."""

    generation: int
    step: int
    worker: int
    part: int
    parts: int
    where: str = LIVE


def newest_covered(offers: Sequence[Offer]) -> tuple[int, int] | None:
    """Return the newest (generation, step) of which all parts are offered, or None where there is none."""
    found: dict[tuple[int, int, int], set[int]] = {}
    for offer in offers:  # what is live may be whole on each worker, and its copies divided among them
        found.setdefault((offer.generation, offer.step, offer.parts), set()).add(offer.part)
    whole = [(generation, step) for (generation, step, parts), held in found.items() if len(held) == parts]
    return max(whole, default=None)


@dataclass(frozen=True)
class _Source:
    """A slice that somebody holds."""

    index: int
    """The member that can send it."""
    number: int
    """Which of that member's states it is of."""
    position: int
    """Which of its slices."""
    where: str
    offset: tuple[int, ...]


class _Request(NamedTuple):
    """A part of a slice that one member wants of another."""

    number: int
    position: int
    box: Box


class Offers:
    """What the members hold together, and the way to get it. Made by `offer`."""

    def __init__(self, held: Sequence[Held], wire: Wire, rooms: Sequence[str]) -> None:
        self._wire, self._rooms, self._held = wire, rooms, list(held)
        briefs = [tuple(Offer(h.generation, h.step, h.worker, h.part, h.parts, h.where)) for h in held]
        said = gather_values(wire, briefs)
        self._offers = [[Offer(*brief) for brief in of_one] for of_one in said]
        self.newest = newest_covered([offer for of_one in self._offers for offer in of_one])
        """The (generation, step) that all can go on from; None where there is none."""
        self.found: dict[str, Found] = {}
        """What tensors that state has. Their slices are with those who hold them: see `fill`."""
        self._sources: dict[str, dict[Box, list[_Source]]] = {}
        self._own: dict[int, dict[str, Any]] = {}
        self._common: dict[str, Any] = {}
        if self.newest is not None:
            self._learn()

    @property
    def step(self) -> int:
        """The step of that state."""
        assert self.newest is not None, "nothing is covered"
        return self.newest[1]

    def alike(self) -> dict[str, Any]:
        """Return what all workers had alike."""
        return self._common

    def own(self, worker: int) -> dict[str, Any] | None:
        """Return what `worker` of that generation had for itself, if anybody knows."""
        return self._own.get(worker)

    def fill(self, wanted: Sequence[Shard]) -> None:
        """Fill the tensors of `wanted` in place. Called by every member, each with what it wants.

        Raises StateLost on all where anything is missing on any; nothing has been filled then. Raises PeerLost where a
        member goes meanwhile; what was to be filled is then undefined.
        """
        moves, missing = self._planned(wanted)
        requests: dict[int, list[_Request]] = {}
        for source, box, _ in moves:
            if not self._is_here(source):
                requests.setdefault(source.index, []).append(_Request(source.number, source.position, box))
        said = gather_values(self._wire, {"missing": missing, "wants": requests})
        lacks = [f"worker {index} lacks {each['missing']}" for index, each in enumerate(said) if each["missing"]]
        if lacks:
            raise StateLost(f"the state after step {self.step} is not whole in the workers' memory: {lacks[0]}.")
        self._copy_here(moves)
        wants = [{int(key): value for key, value in each["wants"].items()} for each in said]
        self._move([_requests(each.get(self._wire.index, [])) for each in wants], moves)

    def _learn(self) -> None:
        """Find out who holds which slices of the state that is taken."""
        chosen = [(number, held) for number, held in enumerate(self._held) if self._is_chosen(held)]
        tables = {
            number: {
                "slices": [
                    [s.name, NAMES[s.tensor.dtype], s.shape, s.offset, tuple(s.tensor.shape)] for s in held.shards
                ],
                "own": held.own,
                "common": held.common,
            }
            for number, held in chosen
        }
        for index, of_one in enumerate(gather_values(self._wire, tables)):
            for number, table in of_one.items():
                self._note(index, int(number), table)

    def _is_chosen(self, state: Held | Offer) -> bool:
        return (state.generation, state.step) == self.newest

    def _note(self, index: int, number: int, table: dict[str, Any]) -> None:
        offer = self._offers[index][number]
        self._own.setdefault(offer.worker, table["own"])
        self._common = self._common or table["common"]
        for position, (name, dtype, shape, offset, sizes) in enumerate(table["slices"]):
            self.found.setdefault(name, Found(DTYPES[dtype], tuple(shape), ()))
            source = _Source(index, number, position, offer.where, tuple(offset))
            box = Box(tuple(offset), tuple(sizes))
            self._sources.setdefault(name, {}).setdefault(box, []).append(source)

    def _planned(self, wanted: Sequence[Shard]) -> tuple[list[tuple[_Source, Box, Tensor]], str]:
        """Return where each part of `wanted` comes from and goes to, and what is missing, in words."""
        moves, missing = [], []
        for shard in wanted:
            found = self.found.get(shard.name)
            if found is not None and found.shape != shard.shape:
                missing.append(f"{shard.name} of shape {list(shard.shape)}, which is {list(found.shape)} there")
                continue
            if found is not None and found.dtype != shard.tensor.dtype:
                missing.append(f"{shard.name} of {shard.tensor.dtype}, which is of {found.dtype} there")
                continue
            box = Box(shard.offset, tuple(shard.tensor.shape))
            holders = self._sources.get(shard.name, {})
            parts, lack = cover(box, ((each, self._nearest(shard.name, held)) for each, held in holders.items()))
            if lack or found is None:
                missing.append(f"{lack:,} numbers of {shard.name}")
            moves += [(source, part, view_of(shard.tensor, shard.offset, part)) for part, source in parts]
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return moves, ", ".join(missing[:_MOST_NAMED]) + more

    def _nearest(self, name: str, sources: Sequence[_Source]) -> _Source:
        """Return the holder of a slice to take it from; of equally near ones, each member takes another."""
        distances = [self._distance(source) for source in sources]
        nearest = [source for source, far in zip(sources, distances, strict=True) if far == min(distances)]
        return nearest[(zlib.crc32(name.encode()) + self._wire.index) % len(nearest)]

    def _distance(self, source: _Source) -> int:
        if source.where == LIVE and source.index == self._wire.index:
            return 0
        if self._rooms[source.index] != self._rooms[self._wire.index] or not self._rooms[source.index]:
            return 3
        return 2 if source.where == LIVE else 1

    def _is_here(self, source: _Source) -> bool:
        """Whether this member can read the slice itself."""
        return self._distance(source) <= 1 or source.index == self._wire.index

    def _copy_here(self, moves: Sequence[tuple[_Source, Box, Tensor]]) -> None:
        """Fill in what this member can read itself."""
        files: dict[str, Sequence[Shard]] = {}
        for source, box, place in moves:
            if not self._is_here(source):
                continue
            if source.index == self._wire.index:
                shards = self._held[source.number].shards
            else:
                if source.where not in files:
                    files[source.where] = self._read(source.where)
                shards = files[source.where]
            with torch.no_grad():
                place.copy_(view_of(shards[source.position].tensor, source.offset, box))

    def _read(self, path: str) -> Sequence[Shard]:
        """Return the slices in a file of this host, which the first member of the host has checked."""
        for slot in SnapshotReader(Path(path)).complete(is_checked=False):
            if slot.step == self.step:
                return slot.shards
        raise StateLost(f"the snapshot of step {self.step} in {path} is gone: somebody has written over it.")

    def _move(self, asked: Sequence[Sequence[_Request]], moves: Sequence[tuple[_Source, Box, Tensor]]) -> None:
        """Send what others have `asked` for, and receive what comes from them, in pieces."""
        goes = [pieces_of([self._part(request) for request in requests]) for requests in asked]
        comes: list[list[list[Tensor]]] = []
        for member in range(self._wire.count):
            mine = [place for source, _, place in moves if source.index == member and not self._is_here(source)]
            comes.append(pieces_of(mine))
        for turn in range(max(map(len, [*goes, *comes]))):
            handles, arrived = [], []
            for member, pieces in enumerate(comes):
                if turn < len(pieces):
                    room = torch.empty(sum(place.nbytes for place in pieces[turn]), dtype=torch.uint8)
                    arrived.append((room, pieces[turn]))
                    handles.append(self._wire.receive(member, room))
            handles += [
                self._wire.send(member, packed(pieces[turn]))
                for member, pieces in enumerate(goes)
                if turn < len(pieces)
            ]
            for handle in handles:
                handle.wait()
            for room, places in arrived:
                unpack(room, places)

    def _part(self, request: _Request) -> Tensor:
        shard = self._held[request.number].shards[request.position]
        return view_of(shard.tensor, shard.offset, request.box)


def offer(held: Sequence[Held], wire: Wire, room: Room | None) -> Offers:
    """Return what the members of `wire` hold together. Called by every member; one that joins holds nothing.

    `held` is this member's own; the snapshots in the `room` of its host are found here.
    """
    rooms: list[str] = gather_values(wire, room.id if room is not None else "")
    is_first = room is not None and rooms.index(room.id) == wire.index
    own = [each for each in held if each.where == LIVE]
    return Offers([*own, *(held_on_host(room) if room is not None and is_first else ())], wire, rooms)


def _requests(said: Sequence[Sequence[Any]]) -> list[_Request]:
    return [_Request(number, position, Box(tuple(at), tuple(sizes))) for number, position, (at, sizes) in said]

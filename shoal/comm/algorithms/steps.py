"""An algorithm as data: which worker sends which part of a tensor to whom, step by step; and its cutting into pieces.

1. An algorithm is a function (index, count, numel) -> the steps of worker `index`: what it sends, and what it receives,
   to add to what it has or to put in its place. Nothing is sent here, so a test can play 100 workers in one process.
2. `compiled` cuts each message into pieces on a grid over the tensor, so that both sides cut alike, and numbers those
   from one worker to another in the order of the steps. The number is the tag by which a piece is told from the others:
   pieces may then leave in any order.
3. It notes which pieces of the next step a received piece `unlocks`: they lie in it, and in nothing else that this step
   receives. These need not wait for the rest of the step.

Example: 4 workers, a ring, 8 numbers, pieces of 1. Worker 1 sends numbers 2 and 3 to worker 2 in its first step,
and receives 0 and 1 from worker 0; as soon as 0 is there and added, it goes on to worker 2, while 1 is under way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class Message:
    """The numbers [begin, end) of a tensor, to or from the worker `other`."""

    other: int
    begin: int
    end: int
    adds: bool = False
    """Whether a receiver adds it to what it has, rather than putting it in its place."""


@dataclass(frozen=True, slots=True)
class Step:
    """What one worker sends and receives at the same time."""

    sends: tuple[Message, ...] = ()
    receives: tuple[Message, ...] = ()


Steps: TypeAlias = list[Step]
Schedule: TypeAlias = Callable[[int, int, int], Steps]
"""Called with index, count, numel."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message that travels by itself, with the tag that it has between its two workers."""

    other: int
    begin: int
    end: int
    adds: bool
    tag: int
    unlocks: tuple["Piece", ...] = ()
    """The pieces of the next step that can be sent once this one has been received."""


@dataclass(frozen=True, slots=True)
class PieceStep:
    """A step in pieces. `locked` are those sends that a receive of the step before unlocks."""

    sends: tuple[Piece, ...]
    receives: tuple[Piece, ...]
    locked: frozenset[Piece]
    added: int
    """How many numbers are received to be added: so much memory they need until they are."""


def part(numel: int, index: int, count: int) -> tuple[int, int]:
    """Return [begin, end) of part `index` of `numel` numbers in `count` parts whose lengths differ by at most 1."""
    return numel * index // count, numel * (index + 1) // count


def spans(numel: int, first: int, blocks: int, count: int) -> list[tuple[int, int]]:
    """Return the spans of `blocks` parts from part `first` on, around the end if need be; none that is empty.

    Example: 10 numbers in 5 parts, 3 of them from part 3 on: (6, 10) and (0, 2).
    """
    last = first + blocks
    around = [(first, min(last, count))] + ([(0, last - count)] if last > count else [])
    found = [(part(numel, low, count)[0], part(numel, high - 1, count)[1]) for low, high in around if low < high]
    return [(begin, end) for begin, end in found if begin < end]


@lru_cache(maxsize=512)  # a training step asks for the same few, again and again
def compiled(schedule: Schedule, index: int, count: int, numel: int, piece_numel: int) -> tuple[PieceStep, ...]:
    """Return the steps of worker `index` in pieces of at most `piece_numel` numbers; empty messages are left out."""
    outgoing: dict[int, int] = {}
    incoming: dict[int, int] = {}
    cut = [
        (
            [piece for message in step.sends for piece in _cut(message, piece_numel, outgoing)],
            [piece for message in step.receives for piece in _cut(message, piece_numel, incoming)],
        )
        for step in schedule(index, count, numel)
    ]
    made: list[PieceStep] = []
    locked: frozenset[Piece] = frozenset()
    for number, (sends, arriving) in enumerate(cut):
        following = cut[number + 1][0] if number + 1 < len(cut) else []
        receives = _unlocking(arriving, following)
        added = sum(piece.end - piece.begin for piece in receives if piece.adds)
        made.append(PieceStep(tuple(sends), tuple(receives), locked, added))
        locked = frozenset(later for piece in receives for later in piece.unlocks)
    return tuple(made)


def _cut(message: Message, piece_numel: int, tags: dict[int, int]) -> list[Piece]:
    pieces, begin = [], message.begin
    while begin < message.end:
        end = min(message.end, (begin // piece_numel + 1) * piece_numel)
        tag = tags.get(message.other, 0)
        tags[message.other] = tag + 1
        pieces.append(Piece(message.other, begin, end, message.adds, tag))
        begin = end
    return pieces


def _unlocking(receives: list[Piece], following: list[Piece]) -> list[Piece]:
    """Return `receives`, each with those of `following` that it alone unlocks."""
    unlocked: dict[int, list[Piece]] = {}
    starts = sorted(range(len(receives)), key=lambda number: receives[number].begin)
    for later in following:
        over = [k for k in starts if receives[k].begin < later.end and later.begin < receives[k].end]
        if len(over) == 1 and receives[over[0]].begin <= later.begin and later.end <= receives[over[0]].end:
            unlocked.setdefault(over[0], []).append(later)
    return [
        Piece(p.other, p.begin, p.end, p.adds, p.tag, tuple(unlocked.get(number, ())))
        for number, p in enumerate(receives)
    ]

"""Running an algorithm: the pieces of its steps sent, received and added, over a wire.

Over Gloo, for each step:

1. the receives of the *next* step are started, so that what arrives early finds its place: Gloo sends nothing before
   the receiver has said where to, and that costs a message. If much comes, and from another worker, they are started
   only when this step has come: two who send to one link overflow its queues, and both slow down;
2. the sends of this step that are still to be made are started, once those of the step before have left;
3. in the order of the pieces, each is awaited and added, and what it unlocks is sent on. The engine's thread receives
   the following pieces meanwhile. What goes to another worker than this step's pieces waits for the next step:
   a receive that is started later could only be told to that worker behind all these bytes.

What is received to be added lies in one of two buffers, in turn. What replaces is received in its place: nobody can
send the final value of a number before it has got all that this worker sends of it.

Additions take the value of the lower worker first, so that two workers who exchange sums get the same, to the last bit.
Over NCCL each step is one batch, and additions follow in the stream's order.

Small tensors are copied into memory that the wire keeps, with all parts of it cut out once: for 4 KB, cutting them out
each time takes as long as sending them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.comm.algorithms.steps import Piece, PieceStep, Schedule, compiled
from shoal.comm.algorithms.wire import Wait, Wire
from shoal.spec.communication import EARLY_BYTES

SMALL_BYTES = 64 << 10
_KEPT = 64
"""How many small tensors' worth of memory a wire keeps; training sums few different sizes."""


class _Departure(NamedTuple):
    """A piece to send: its bytes, to whom, and its tag."""

    data: Tensor
    other: int
    tag: int
    copy: Tensor | None = None
    """Where the bytes are copied to be sent from, if they may change before they have left."""


class _Arrival(NamedTuple):
    """A piece to receive, the two terms and the sum if it is to be added, and what can be sent then."""

    data: Tensor
    other: int
    tag: int
    terms: tuple[Tensor, Tensor, Tensor] | None
    unlocks: list[_Departure]


class _Cut(NamedTuple):
    """A step with its tensors cut out; `sends` are those that nothing of the step before unlocks."""

    sends: list[_Departure]
    receives: list[_Arrival]
    all_sends: list[_Departure]


class Kept(NamedTuple):
    """Memory for a small tensor, and the steps on it."""

    numbers: Tensor
    steps: list[_Cut]


def run(schedule: Schedule, tensor: Tensor, wire: Wire) -> None:
    """Do what `schedule` says to `tensor`, in place. Called by every worker of `wire`, with equal shapes.

    If a worker is gone, raises PeerLost; `tensor` is then undefined.
    """
    with wire.carried(tensor) as numbers:
        runs = _run_batches if wire.is_batched and numbers.is_cuda else _run_pieces
        if numbers.numel() * numbers.element_size() <= SMALL_BYTES:
            kept = _kept(schedule, numbers, wire)
            kept.numbers.copy_(numbers)
            runs(kept.steps, wire)
            numbers.copy_(kept.numbers)
        else:
            steps = _compiled(schedule, numbers, wire)
            most = [max((step.added for step in steps[turn::2]), default=0) for turn in (0, 1)]
            buffers = [wire.scratch(turn, most[turn] * numbers.element_size(), numbers.device) for turn in (0, 1)]
            runs(_cut_out(steps, numbers, buffers, wire.index), wire)


def _kept(schedule: Schedule, like: Tensor, wire: Wire) -> Kept:
    """Return the memory that `wire` keeps for `schedule` on tensors as `like`."""
    key = (schedule, like.numel(), like.dtype, like.device)
    found = wire.kept.get(key)
    if found is None:
        steps, numbers = _compiled(schedule, like, wire), torch.empty_like(like)
        num_bytes = max((step.added for step in steps), default=0) * like.element_size()
        buffers = [torch.empty(num_bytes, dtype=torch.uint8, device=like.device) for _ in range(2)]
        if len(wire.kept) >= _KEPT:
            wire.kept.clear()
        wire.kept[key] = found = Kept(numbers, _cut_out(steps, numbers, buffers, wire.index, copies=True))
    return found


def _compiled(schedule: Schedule, numbers: Tensor, wire: Wire) -> tuple[PieceStep, ...]:
    piece_numel = max(1, wire.piece_bytes // numbers.element_size())
    return compiled(schedule, wire.index, wire.count, numbers.numel(), piece_numel)


def _cut_out(
    steps: Sequence[PieceStep], numbers: Tensor, buffers: Sequence[Tensor], index: int, *, copies: bool = False
) -> list[_Cut]:
    """Return the steps with their tensors; with `copies`, what is added to while it is sent is sent from a copy."""
    data, size, made = numbers.view(torch.uint8), numbers.element_size(), list[_Cut]()

    def departure(piece: Piece, number: int) -> _Departure:
        sent = data[piece.begin * size : piece.end * size]
        added = (each for each in steps[number].receives if each.adds)
        changes = copies and any(each.begin < piece.end and piece.begin < each.end for each in added)
        return _Departure(sent, piece.other, piece.tag, torch.empty_like(sent) if changes else None)

    for turn, step in enumerate(steps):
        used, receives = 0, []
        for piece in step.receives:
            unlocks = [departure(later, turn + 1) for later in piece.unlocks]
            mine, terms = data[piece.begin * size : piece.end * size], None
            if piece.adds:
                place, used = buffers[turn % 2][used : used + mine.numel()], used + mine.numel()
                total, received = mine.view(numbers.dtype), place.view(numbers.dtype)
                terms = (received, total, total) if piece.other < index else (total, received, total)
                mine = place
            receives.append(_Arrival(mine, piece.other, piece.tag, terms, unlocks))
        all_sends = [(piece, departure(piece, turn)) for piece in step.sends]
        sends = [cut for piece, cut in all_sends if piece not in step.locked]
        made.append(_Cut(sends, receives, [cut for _, cut in all_sends]))
    return made


def _overlap(one: Tensor, other: Tensor) -> bool:
    ends = [(each.data_ptr(), each.data_ptr() + each.numel() * each.element_size()) for each in (one, other)]
    return ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]


def _run_pieces(steps: Sequence[_Cut], wire: Wire) -> None:
    leaving: list[tuple[Tensor, Wait]] = []
    held: list[_Departure] = []
    awaited = _receive(steps, 0, wire)
    for number, step in enumerate(steps):
        following = _receive(steps, number + 1, wire) if _is_welcome_early(steps, number) else None
        sends, held = held + step.sends, []
        if sends:
            _wait(leaving)
            leaving = _send(sends, wire)
        busy = {departure.other for departure in step.all_sends}
        for arrival, wait in zip(step.receives, awaited, strict=True):
            wait()
            leaving = _wait_for_place(arrival, leaving)
            _add(arrival)
            for departure in arrival.unlocks:
                if departure.other in busy:
                    leaving += _send([departure], wire)
                else:
                    held.append(departure)
        awaited = _receive(steps, number + 1, wire) if following is None else following
    _wait(leaving)


def _send(departures: Sequence[_Departure], wire: Wire) -> list[tuple[Tensor, Wait]]:
    leaving = []
    for data, other, tag, copy in departures:
        sent = data if copy is None else copy.copy_(data)
        leaving.append((sent, wire.send(sent, other, tag=tag)))
    return leaving


def _wait_for_place(arrival: _Arrival, leaving: list[tuple[Tensor, Wait]]) -> list[tuple[Tensor, Wait]]:
    """Wait until the numbers that `arrival` is added to have left, where they are on their way; return the others.

    In recursive doubling they are: the other worker would receive some of them summed already.
    """
    if arrival.terms is None:
        return leaving
    total = arrival.terms[2]
    same = [each for each in leaving if _overlap(each[0], total)]
    _wait(same)
    return [each for each in leaving if not any(each is other for other in same)] if same else leaving


def _is_welcome_early(steps: Sequence[_Cut], number: int) -> bool:
    """Return whether step `number` + 1 may arrive with step `number`: that is little, or both from the same workers."""
    if number + 1 >= len(steps) or sum(arrival.data.numel() for arrival in steps[number].receives) <= EARLY_BYTES:
        return True
    following = {arrival.other for arrival in steps[number + 1].receives}
    return following <= {arrival.other for arrival in steps[number].receives}


def _receive(steps: Sequence[_Cut], number: int, wire: Wire) -> list[Wait]:
    """Start the receives of step `number`, if there is one; return how to await each."""
    if number >= len(steps):
        return []
    return [wire.receive(arrival.data, arrival.other, tag=arrival.tag) for arrival in steps[number].receives]


def _run_batches(steps: Sequence[_Cut], wire: Wire) -> None:
    for step in steps:
        wire.exchange(
            [(departure.data, departure.other) for departure in step.all_sends],
            [(arrival.data, arrival.other) for arrival in step.receives],
        )
        for arrival in step.receives:
            _add(arrival)


def _add(arrival: _Arrival) -> None:
    if arrival.terms is not None:
        first, second, total = arrival.terms
        torch.add(first, second, out=total)


def _wait(leaving: Sequence[tuple[Tensor, Wait]]) -> None:
    for _, wait in leaving:
        wait()

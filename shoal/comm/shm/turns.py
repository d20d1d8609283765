"""Collectives of tensors that lie in a worker's own memory: through slots in shared memory, a turn at a time.

Each worker has two slots that all can read; even turns use one, odd turns the other. In each turn a worker

1. writes what others need into its own slot of this turn,
2. rings and waits for all others, and checks that they are in the same collective,
3. reads what it needs from the slots of the others.

One wait a turn is enough: who has rung for turn t has finished reading turn t - 1, so its slots of that parity may be
written again. Every collective, also a barrier, is a number of such turns, so they can follow each other in any order.

All-reduce of 3 workers or more: each adds up its own slice of a chunk. In turn t they write the inputs of chunk t and
the sums of chunk t - 1. Example: 4 workers, 10 chunks: 11 turns, in each of which a worker copies 3/4 of a chunk in,
adds up 1/4, and copies 3/4 of the sums out. Two workers, and small tensors: everybody adds up everything, in one turn a
chunk.
"""

import torch

from shoal.comm.shm.buffer import SharedBuffer, name_of
from shoal.comm.shm.sums import Adder, slice_of
from shoal.comm.shm.watch import Watch
from shoal.core.errors import PlanError

SLOT_BYTES = 2 << 20
"""Of 256 KB to 4 MB the best or near it, with 2 workers and with 4 on 2 cores (November 2026)."""
_KINDS = ("barrier", "all_reduce", "reduce_scatter", "all_gather", "broadcast")
_DTYPES = sorted({kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}, key=str)
_DTYPE_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES, start=1)}
"""The same on all workers, who have one torch; 0 is that of a barrier."""
_DIRECT_BYTES = 16 << 10  # up to here one turn with more to add beats two turns


class Turns:
    """The slots of one worker's group, and whose turn it is."""

    def __init__(self, slots: SharedBuffer, watch: Watch, *, index: int, count: int) -> None:
        self._watch, self._slots, self._index, self._count, self._parity = watch, slots, index, count, 0
        self._others = [other for other in range(count) if other != index]
        self._typed: dict[torch.dtype, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._adders: dict[torch.dtype, Adder] = {}

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self._turn("barrier")

    def all_reduce(self, flat: torch.Tensor) -> None:
        """Put the sum over all workers into `flat`."""
        if self._count == 1:
            return
        adder = self._adder(flat.dtype)
        if self._count == 2 or flat.numel() * flat.itemsize <= _DIRECT_BYTES:
            self._all_reduce_directly(flat, adder)
        else:
            self._all_reduce_by_slices(flat, adder)

    def reduce_scatter(self, out: torch.Tensor, parts: torch.Tensor) -> None:
        """Put the sum over all workers of row `index` of `parts` into `out`; parts is (count, numel)."""
        adder = self._adder(out.dtype)
        own, own_parts = self._index, list(parts.unbind(0))
        if own >= 2 and out.data_ptr() == own_parts[own].data_ptr():
            own_parts[own] = own_parts[own].clone()  # in place: the first addition would overwrite what is added later
        step = SLOT_BYTES // out.itemsize // self._count // 64 * 64
        for begin in range(0, out.numel(), step):
            end = min(begin + step, out.numel())
            slots, size = self._slot_of(out.dtype), end - begin
            for other in self._others:
                slots[own][other * step : other * step + size].copy_(own_parts[other][begin:end])
            self._turn("reduce_scatter", parts)
            adder.add(
                [
                    own_parts[own][begin:end] if worker == own else slots[worker][own * step : own * step + size]
                    for worker in range(self._count)
                ],
                out=out[begin:end],
            )

    def all_gather(self, out: torch.Tensor, part: torch.Tensor) -> None:
        """Put `part` of worker i into row i of `out`, which is (count, numel)."""
        rows, step = list(out.unbind(0)), SLOT_BYTES // part.itemsize
        for begin in range(0, part.numel(), step):
            end = min(begin + step, part.numel())
            slots = self._slot_of(part.dtype)
            slots[self._index][: end - begin].copy_(part[begin:end])
            self._turn("all_gather", out)
            for other in self._others:
                rows[other][begin:end].copy_(slots[other][: end - begin])
        rows[self._index].copy_(part)

    def broadcast(self, flat: torch.Tensor, source: int) -> None:
        """Put what worker `source` has in `flat` into everybody's."""
        step = SLOT_BYTES // flat.itemsize
        for begin in range(0, flat.numel(), step):
            piece = flat[begin : begin + step]
            slot = self._slot_of(flat.dtype)[source][: piece.numel()]
            if source == self._index:
                slot.copy_(piece)
            self._turn("broadcast", flat)
            if source != self._index:
                piece.copy_(slot)

    def _all_reduce_directly(self, flat: torch.Tensor, adder: Adder) -> None:
        step = SLOT_BYTES // flat.itemsize
        for begin in range(0, flat.numel(), step):
            piece = flat[begin : begin + step]
            slots = [slot[: piece.numel()] for slot in self._slot_of(flat.dtype)]
            slots[self._index].copy_(piece)
            self._turn("all_reduce", flat)
            if self._index < 2:
                slots[self._index] = piece  # already in the cache
            adder.add(slots, out=piece)

    def _all_reduce_by_slices(self, flat: torch.Tensor, adder: Adder) -> None:
        own, count = self._index, self._count
        each = SLOT_BYTES // flat.itemsize // (count + 1) // 64 * 64  # a slot: a slice for each worker, and the sums
        chunks = [(begin, min(begin + each * count, flat.numel())) for begin in range(0, flat.numel(), each * count)]
        sums_at = each * count
        for turn in range(len(chunks) + 1):
            slots, next_slot = self._slot_of(flat.dtype), self._slot_of(flat.dtype, turns_ahead=1)[own]
            if turn < len(chunks):
                for other in self._others:
                    first, last = slice_of(*chunks[turn], index=other, count=count)
                    slots[own][other * each : other * each + last - first].copy_(flat[first:last])
            self._turn("all_reduce", flat)
            if turn > 0:
                for other in self._others:
                    first, last = slice_of(*chunks[turn - 1], index=other, count=count)
                    flat[first:last].copy_(slots[other][sums_at : sums_at + last - first])
            if turn < len(chunks):
                first, last = slice_of(*chunks[turn], index=own, count=count)
                parts = [slot[own * each : own * each + last - first] for slot in slots]
                parts[own] = flat[first:last]
                sums = next_slot[sums_at : sums_at + last - first]
                adder.add(parts, out=sums)
                flat[first:last].copy_(sums)

    def _turn(self, kind: str, tensor: torch.Tensor | None = None) -> None:
        """Meet the others in this turn, for a collective of `tensor`; from here on it is the next one's."""
        call, parity = _number(kind, tensor), self._parity
        self._watch.note_call(call, parity=parity)
        self._slots.ready.ring()
        self._slots.ready.wait(kind)
        self._parity ^= 1
        calls = self._watch.calls(parity=parity)
        if calls.count(call) != len(calls):
            said = [f"worker {at} {_in_words(each)}" for at, each in enumerate(calls)]
            raise PlanError(f"workers call different collectives at once: {', '.join(said)}. All must call the same.")

    def _slot_of(self, dtype: torch.dtype, *, turns_ahead: int = 0) -> list[torch.Tensor]:
        """Return every worker's slot of this turn."""
        if dtype not in self._typed:
            halves = [row.view(2, SLOT_BYTES) for row in self._slots.rows]
            self._typed[dtype] = [(half[0].view(dtype), half[1].view(dtype)) for half in halves]
        parity = (self._parity + turns_ahead) % 2
        return [pair[parity] for pair in self._typed[dtype]]

    def _adder(self, dtype: torch.dtype) -> Adder:
        if dtype not in self._adders:
            self._adders[dtype] = Adder(dtype)
        return self._adders[dtype]


def _number(kind: str, tensor: torch.Tensor | None) -> int:
    """Return a collective as a number: its kind, the numbers' dtype, and their bytes, up to 2**48."""
    if tensor is None:
        return _KINDS.index(kind) << 56
    return _KINDS.index(kind) << 56 | _DTYPE_NUMBERS[tensor.dtype] << 48 | tensor.nbytes


def _in_words(call: int) -> str:
    """Return the collective of a number."""
    kind, dtype = _KINDS[call >> 56], call >> 48 & 0xFF
    return f"{kind} of {call & (1 << 48) - 1} bytes of {name_of(_DTYPES[dtype - 1])}" if dtype else kind

"""A made-up training state, cut as different meshes cut it, and members that are threads: for tests of exchanges."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.fault.shards import Shard
from shoal.fault.snapshot import Held

_TIMEOUT_S = 60.0
SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "model/in.weight": ((7, 6), torch.float32),
    "model/in.bias": ((7,), torch.float32),
    "model/out.weight": ((3, 8), torch.bfloat16),
    "model/scale": ((), torch.float32),
    "model/none": ((0, 4), torch.float32),
    "buffer/mask": ((5,), torch.bool),
    "optimizer/exp_avg/in.weight": ((7, 6), torch.float32),
    "optimizer/exp_avg/in.bias": ((7,), torch.float32),
    "optimizer/exp_avg/out.weight": ((3, 8), torch.float32),
    "optimizer/step/in.weight": ((), torch.float32),
    "optimizer/count/in.weight": ((), torch.int64),
}


@dataclass(frozen=True)
class Cut:
    """How many workers stand along each axis."""

    pipeline: int = 1
    replicate: int = 1
    rows: int = 1
    columns: int = 1

    @property
    def workers(self) -> int:
        """How many workers there are."""
        return self.pipeline * self.replicate * self.rows * self.columns

    @property
    def parts(self) -> int:
        """How many of them hold different slices."""
        return self.pipeline * self.rows * self.columns

    def part_of(self, worker: int) -> int:
        """Return which part a worker holds."""
        rest, column = divmod(worker, self.columns)
        rest, row = divmod(rest, self.rows)
        return (rest // self.replicate * self.rows + row) * self.columns + column


CUTS = {
    "one": Cut(),
    "3 replicas": Cut(replicate=3),
    "2 shards": Cut(rows=2),
    "3 shards": Cut(rows=3),
    "2 x 2 shards": Cut(replicate=2, rows=2),
    "2 columns": Cut(columns=2),
    "2 stages": Cut(pipeline=2),
    "2 stages, 2 shards": Cut(pipeline=2, rows=2),
}


def whole_state(step: int) -> dict[str, Tensor]:
    """Return the state after `step`: numbers of which no two tensors or steps have the same."""
    generator = torch.Generator().manual_seed(step)
    made = {}
    for name, (shape, dtype) in SHAPES.items():
        numbers = torch.rand(shape, generator=generator) * 1000
        made[name] = numbers > 500 if dtype == torch.bool else numbers.to(dtype)
    return made


def slices(cut: Cut, worker: int, state: dict[str, Tensor]) -> list[Shard]:
    """Return copies of the slices that `worker` holds."""
    part = cut.part_of(worker)
    part, column = divmod(part, cut.columns)
    stage, row = divmod(part, cut.rows)
    names = list(state)
    found = []
    for name in names[stage :: cut.pipeline]:
        whole = state[name]
        held, offset = whole, [0] * whole.dim()
        for dim, (index, count) in enumerate([(row, cut.rows), (column, cut.columns)][: whole.dim()]):
            each = -(-whole.shape[dim] // count)
            begin = min(whole.shape[dim], index * each)
            offset[dim] = begin
            held = held.narrow(dim, begin, min(each, whole.shape[dim] - begin))
        found.append(Shard(name, held.clone(), tuple(whole.shape), tuple(offset)))
    return found


def held(cut: Cut, worker: int, *, step: int, generation: int = 0) -> Held:
    """Return the live state of `worker` after `step`."""
    shards = slices(cut, worker, whole_state(step))
    own, common = {"who": worker}, {"step": step, "generation": generation}
    return Held(generation, step, worker, cut.part_of(worker), cut.parts, shards, own, common)


def emptied(shards: list[Shard]) -> list[Shard]:
    """Fill the slices with zeros, and return them."""
    for shard in shards:
        shard.tensor.zero_()
    return shards


def wrong(cut: Cut, worker: int, shards: list[Shard], *, step: int) -> list[str]:
    """Return the names of the slices whose bits are not those after `step`."""
    expected = slices(cut, worker, whole_state(step))
    return [a.name for a, b in zip(shards, expected, strict=True) if not torch.equal(a.tensor, b.tensor)]


class _Sent:
    def __init__(self, done: Callable[[], object]) -> None:
        self._done = done

    def wait(self) -> None:
        self._done()


class Threads:
    """Members that are threads of this process."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=_TIMEOUT_S)
        self._said: list[bytes] = [b""] * count
        self._queues = {(a, b): queue.Queue[Tensor]() for a in range(count) for b in range(count)}
        self.sent = [0] * count
        """How many bytes each has sent."""

    def run(self, work: Callable[["ThreadWire"], Any]) -> list[Any]:
        """Return what `work` returned, or raised, on each member."""
        answers: list[Any] = [None] * self.count

        def be(index: int) -> None:
            try:
                answers[index] = work(ThreadWire(self, index))
            except Exception as error:
                answers[index] = error

        threads = [threading.Thread(target=be, args=(index,)) for index in range(self.count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_TIMEOUT_S)
        return answers


class ThreadWire:
    """One member's end."""

    def __init__(self, threads: Threads, index: int) -> None:
        self.index, self.count, self._threads = index, threads.count, threads

    def gather(self, data: bytes) -> list[bytes]:
        """Return what each member has given."""
        threads = self._threads
        threads._said[self.index] = data
        threads._barrier.wait()
        said = list(threads._said)
        threads._barrier.wait()
        return said

    def send(self, to: int, data: Tensor) -> _Sent:
        """Send bytes to a member."""
        self._threads.sent[self.index] += data.nbytes
        self._threads._queues[self.index, to].put(data.clone())
        return _Sent(lambda: None)

    def receive(self, source: int, data: Tensor) -> _Sent:
        """Receive bytes of a member, when waited for."""
        come = self._threads._queues[source, self.index]
        return _Sent(lambda: data.copy_(come.get(timeout=_TIMEOUT_S)))

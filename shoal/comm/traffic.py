"""What this process exchanges with the others: how often, how much at once, and how long it takes.

1. Whoever runs a collective notes when it began and ended. On the processor that is read from the clock, on a GPU from
   events in the stream, and only in one step of 20: making two events for each of many collectives takes a noticeable
   time of a short step. A collective that was not timed counts as those of its kind that were.
2. The calls of one step are kept, each with its moments, until the next: if it was remarkable, they go into its trace.
3. Those of many steps are added up together, by kind (operation, algorithm, link, bytes), when somebody takes them for
   an event: done for each step by itself, with caches that hold something else by then, it takes several times as long.

Example: 4 buckets of 1 MB in each of 100 steps, 2 ms each: one line, of 400 calls and 0.8 s.
"""

import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

Moment: TypeAlias = Any
"""Seconds, an event in a GPU's stream, or None where nothing was noted."""

SHARED = "shared-memory"
_EVERY_STEPS = 20
_MOST_CALLS = 4096


class Kind(NamedTuple):
    """What calls are added up by."""

    op: str
    """all-reduce, reduce-scatter, all-gather, all-to-all or broadcast."""
    algorithm: str
    """shared-memory, engine (that of Gloo or NCCL), or the name of an algorithm."""
    link: str
    """shm, host, network or gpu."""
    num_bytes: int
    """Of one call, as the caller sees them: what travels depends on the algorithm."""


class Spent(NamedTuple):
    """A call, with its moments."""

    kind: Kind
    begin: Moment
    end: Moment


_Kind: TypeAlias = tuple[str, str, str, int]
Noted: TypeAlias = tuple[_Kind, Moment, Moment]
"""The same, of plain tuples: there are several in every step, and few that anybody asks for by name (`named`)."""


def named(calls: Iterable[Noted]) -> list[Spent]:
    """Return the calls that were timed, with names for what they hold."""
    return [Spent(Kind(*kind), begin, end) for kind, begin, end in calls if begin is not None]


@dataclass
class _Sum:
    count: int = 0
    timed: int = 0
    seconds: float = 0.0


@dataclass
class Traffic:
    """The collectives of one process, from any of its threads."""

    link: str = "host"
    """What joins the workers: set by whoever knows."""
    is_traced: bool = False
    """Whether all calls on a GPU are timed."""
    _steps: int = 0
    _calls: list[Noted] = field(default_factory=list)
    """Of this step. Several threads append, and one takes what it sees: that needs no lock."""
    _uncounted: deque[Noted] = field(default_factory=deque)
    _sums: dict[_Kind, _Sum] = field(default_factory=dict)
    _pending: list[Noted] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, tensor: torch.Tensor) -> Moment:
        """Return the moment at which a collective on `tensor` begins."""
        return self._now(tensor) if not tensor.is_cuda or self._times_gpu else None

    def end(self, begin: Moment, op: str, algorithm: str, tensor: torch.Tensor, *, link: str = "") -> None:
        """Note that a collective on `tensor`, which began then, is done: in the stream that is current, on a GPU."""
        self.add(begin, None if begin is None else self._now(tensor), op, algorithm, tensor.nbytes, link=link)

    def add(self, begin: Moment, end: Moment, op: str, algorithm: str, num_bytes: int, *, link: str = "") -> None:
        """Note a collective that lasted from `begin` to `end`."""
        noted = ((op, algorithm, link or self.link, num_bytes), begin, end)
        if len(self._calls) < _MOST_CALLS:
            self._calls.append(noted)
        self._uncounted.append(noted)
        if len(self._uncounted) >= _MOST_CALLS:
            self._add_up()

    def timing(self, op: str, algorithm: str, tensor: torch.Tensor, *, link: str = "") -> "_Timing":
        """Note what runs in a `with` block as a collective on `tensor`; nothing, if it fails."""
        return _Timing(self, op, algorithm, tensor, link)

    def take_step(self) -> list[Noted]:
        """Return the calls since the last time, for the trace of a step. Called once a step."""
        self._steps += 1
        calls = self._calls[:]
        del self._calls[: len(calls)]
        return calls

    def take(self) -> list[dict[str, Any]]:
        """Return what all calls since the last time add up to, the most expensive kind first."""
        self._add_up()
        with self._lock:
            self._read_pending()
            sums, self._sums = self._sums, {}
        calls = [
            {
                "op": op,
                "algorithm": algorithm,
                "link": link,
                "bytes": num_bytes,
                "count": total.count,
                "seconds": round(total.seconds * total.count / max(1, total.timed), 6),
            }
            for (op, algorithm, link, num_bytes), total in sums.items()
        ]
        return sorted(calls, key=lambda call: -float(str(call["seconds"])))

    @property
    def _times_gpu(self) -> bool:
        return self.is_traced or self._steps % _EVERY_STEPS == 1

    def _now(self, tensor: torch.Tensor) -> Moment:
        if not tensor.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(tensor.device))
        return event

    def _add_up(self) -> None:
        with self._lock:
            for _ in range(len(self._uncounted)):
                kind, begin, end = self._uncounted.popleft()
                total = self._sums.setdefault(kind, _Sum())
                total.count += 1
                if isinstance(begin, float):
                    total.timed += 1
                    total.seconds += end - begin
                elif begin is not None and len(self._pending) < _MOST_CALLS:
                    self._pending.append((kind, begin, end))

    def _read_pending(self) -> None:
        """Count the calls on a GPU that are done by now."""
        waiting = []
        for kind, begin, end in self._pending:
            if not end.query():
                waiting.append((kind, begin, end))
                continue
            total = self._sums.setdefault(kind, _Sum())
            total.timed += 1
            total.seconds += float(begin.elapsed_time(end)) / 1e3
        self._pending = waiting


class _Timing(AbstractContextManager[None]):
    """What `Traffic.timing` returns; no generator, which takes longer, as there are several in every step."""

    __slots__ = ("_algorithm", "_begin", "_link", "_op", "_tensor", "_traffic")

    def __init__(self, traffic: Traffic, op: str, algorithm: str, tensor: torch.Tensor, link: str) -> None:
        self._traffic, self._op, self._algorithm, self._tensor, self._link = traffic, op, algorithm, tensor, link
        self._begin: Moment = None

    def __enter__(self) -> None:
        self._begin = self._traffic.begin(self._tensor)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._traffic.end(self._begin, self._op, self._algorithm, self._tensor, link=self._link)


TRAFFIC = Traffic()
"""That of this process: it is one worker."""

"""Whether training waits for its data, and how far ahead to load so that it does not.

1. Of each chunk of batches, note how long the worker waited for it, how long it used it, and how long loading took.
2. A worker that waits for a noticeable part of its time, three chunks in a row, is loaded for ahead from then on.
   Not from the start, because a thread that runs beside the worker on cores that are all busy costs more than it brings
   where loading is cheap: 3 to 5% of a step of 15 ms, with 2 workers on 2 cores (2026-11), since every delay of one
   worker is waited for by all.
3. If it still waits although loading keeps up on average, single chunks take longer than others: one more is loaded
   ahead. If loading does not keep up, no depth helps: the loader is the bottleneck, and says so.

Example: 2 threads, 10 ms to load a chunk, 6 ms to use one: loading delivers one in 5 ms, so it keeps up, and a chunk
that once takes 30 ms is worth another two ahead.
"""

from collections import deque
from dataclasses import dataclass

NOTICEABLE = 0.05
_MOST_AHEAD = 16
_LEAST, _RECENT = 8, 32
"""Of how many chunks that is judged: the first ones are slow by themselves."""
_WORTH_S = 5e-4
"""What delays a chunk takes milliseconds (a visit to the storage, another process): chunks that are used faster than
this do not bridge it, however many there are, and only take memory."""
_ALL = 0.98
"""Whoever waits for more than that of the time only loads: how many threads would be enough means nothing then."""


@dataclass(frozen=True)
class Report:
    """What loading cost so far."""

    batches: int
    waited_s: float
    """How long the worker stood still because no batch was there."""
    used_s: float
    """How long it did something else than wait for a batch."""
    load_s: float
    """How long the threads or processes were busy loading, added up over them."""
    threads: int
    ahead: int
    """How many chunks were loaded ahead in the end; 0: only when asked for."""
    load_cpu_s: float = 0.0
    """How long they computed meanwhile: what is left of `load_s` is waiting, as for storage."""
    chunk_batches: float = 1.0
    """How many batches a chunk has, in the mean."""
    last_loads: tuple[tuple[int, float, float], ...] = ()
    """Of the last chunks: which thread loaded it, and from when to when (time.perf_counter)."""

    @property
    def waiting(self) -> float:
        """The fraction of the time in which the worker waited for data."""
        return self.waited_s / max(self.waited_s + self.used_s, 1e-12)

    @property
    def is_bottleneck(self) -> bool:
        """Whether the worker waited for a noticeable part of its time."""
        return self.waiting > NOTICEABLE

    def __str__(self) -> str:
        if not self.batches:
            return "Nothing has been loaded yet."
        a_batch = f"{1e3 * self.waited_s / self.batches:.3g} ms of {1e3 * self._batch_s:.3g} ms a batch"
        if not self.is_bottleneck:
            return f"Loading is not the bottleneck: {self.waiting:.1%} of the time was spent waiting ({a_batch})."
        return (
            f"Loading is the bottleneck: {self.waiting:.0%} of the time was spent waiting for data ({a_batch}); "
            f"{self._advice}"
        )

    @property
    def _batch_s(self) -> float:
        return (self.waited_s + self.used_s) / self.batches

    @property
    def _advice(self) -> str:
        needed = self.load_s / max(self.used_s, 1e-12)
        if needed <= self.threads:
            return f"single batches take long: load more than {self.ahead} ahead (prefetch), or stage the data."
        if self.waiting < _ALL:
            return f"to keep up, {needed:.1f} threads would have to load, and there were {self.threads}."
        return f"the worker does nothing else, and {self.threads} thread(s) load as fast as they can."


class Pace:
    """Decides how many chunks are loaded ahead. `prefetch`: that many, from the start; None: by what is measured."""

    def __init__(self, *, threads: int, prefetch: int | None = None, is_ahead: bool = False, at_first: int = 2) -> None:
        self._threads = threads
        self._is_fixed = prefetch is not None
        self.ahead = prefetch if prefetch is not None else at_first if is_ahead else 0
        """How many chunks may be loaded before they are asked for."""
        self._at_first = at_first
        self._slow = 0
        self._batches = 0
        self._waited_s = self._used_s = self._load_s = self._load_cpu_s = 0.0
        self._chunks = 0
        self.last_loads: deque[tuple[int, float, float]] = deque(maxlen=_RECENT)
        """Appended to by the threads that load: which thread, from when to when."""
        self._recent: deque[tuple[float, float]] = deque(maxlen=_RECENT)
        """How long loading and using each of the last chunks took."""

    def note(
        self, *, batches: int, waited_s: float, used_s: float, load_s: float, load_cpu_s: float = 0.0, chunks: int = 1
    ) -> None:
        """Learn from one chunk of `batches`, or from several."""
        self._batches += batches
        self._chunks += chunks
        self._load_cpu_s += load_cpu_s
        self._waited_s += waited_s
        self._used_s += used_s
        self._load_s += load_s
        self._recent.append((load_s / chunks, used_s / chunks))
        if self._is_fixed:
            return
        self._slow = self._slow + 1 if waited_s > NOTICEABLE * used_s else 0
        if self._slow >= 3 and not self.ahead:
            self.ahead, self._slow = self._at_first, 0
        elif self._slow and self.ahead and self.ahead < _MOST_AHEAD and self._is_worth_more:
            self.ahead += 1

    @property
    def _is_worth_more(self) -> bool:
        """Whether one chunk more would be waited for less: loading keeps up in the mean, and a chunk lasts for long.

        Of use it is the median that counts: a worker that did something else for a minute uses its data no slower.
        """
        if len(self._recent) < _LEAST:
            return False
        load_s = sum(load_s for load_s, _ in self._recent) / len(self._recent)
        used_s = sorted(used_s for _, used_s in self._recent)[len(self._recent) // 2]
        return used_s > _WORTH_S and load_s / self._threads < used_s

    def report(self) -> Report:
        """Return what was noted so far."""
        return Report(
            batches=self._batches,
            waited_s=self._waited_s,
            used_s=self._used_s,
            load_s=self._load_s,
            threads=self._threads,
            ahead=self.ahead,
            load_cpu_s=self._load_cpu_s,
            chunk_batches=self._batches / max(1, self._chunks),
            last_loads=tuple(self.last_loads),
        )

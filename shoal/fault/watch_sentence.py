"""From what every worker says of itself, one sentence: who holds the others up, where, and in what they wait.

1. A worker waits if it is in a collective and its main thread is not in the user's code.
2. It waits for those workers of its collective that have not entered it: their count of that lane is lower.
3. To blame are those that are waited for and do not wait themselves: they are somewhere else, or silent.
4. If all wait, each for one that waits, they call different collectives, or the same one with other shapes: none of
   them can ever go on, and the hang is final.
5. If all are in the same collective, it is the engine or its link; if nobody waits at all, all are where they are.

Example: workers 0, 1 and 2 of 4 wait in all-reduce #1204, bucket 7; worker 3 has entered #1203, and left it. "worker 3
is in dataset.py:88 (12.1 s), the others wait in all-reduce #1204, bucket 7."
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.comm.calls import Call

_MOST_NAMED = 4
"""How many kinds of workers a sentence lists."""


@dataclass(frozen=True)
class Entry:
    """Where one worker is."""

    step: int = 0
    still_s: float = 0.0
    """For how long nothing has moved: no collective entered or left, no step, no batch."""
    place: str = ""
    """The innermost line of the user's code, such as "dataset.py:88", or else of shoal's."""
    is_busy: bool = False
    """Whether its main thread is in the user's code."""
    waits: tuple[Call, ...] = ()
    entered: Mapping[str, int] = field(default_factory=dict)
    """How many collectives of each lane it has entered."""
    silence: str = ""
    """Why it says nothing, if it does: "is stopped by a signal". Then all else is what it said last."""

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for others."""
        return bool(self.waits) and not self.is_busy and not self.silence


@dataclass(frozen=True)
class Hang:
    """Why nothing goes on."""

    sentence: str
    blamed: tuple[int, ...]
    """The workers that the others wait for; none where all wait."""
    is_final: bool
    """Whether no waiting can help."""

    @property
    def key(self) -> tuple[tuple[int, ...], bool]:
        """What makes it the same hang when it is looked at again: the sentence has seconds in it."""
        return self.blamed, self.is_final


def explain(entries: Mapping[int, Entry]) -> Hang | None:
    """Return why the workers of `entries` do not go on; None if they do, or nobody waits for anybody."""
    waiting = {worker: entry for worker, entry in entries.items() if entry.is_waiting}
    silent = [worker for worker, entry in entries.items() if entry.silence]
    if not waiting and not silent:
        return None
    late = {worker: _late(worker, entry, entries) for worker, entry in waiting.items()}
    wanted = set().union(*late.values(), silent)
    blamed = [worker for worker in sorted(wanted) if worker not in waiting]
    if not blamed and len(waiting) < len(entries):  # messages between two tell nothing of who is late
        blamed = [worker for worker in sorted(entries) if worker not in waiting]
    if blamed:
        others = [worker for worker in sorted(entries) if worker not in blamed]
        return Hang(f"{_held_up(entries, blamed)}{_who_waits(entries, others, ', ')}.", tuple(blamed), is_final=False)
    if _is_crossed(late) or _is_mixed(waiting):
        said = _who_waits(entries, sorted(waiting), "", with_place=True)
        return Hang(f"the workers call different collectives, and none can go on: {said}.", (), is_final=True)
    longest_s = max(entry.still_s for entry in waiting.values())
    said = _who_waits(entries, sorted(waiting), "")
    return Hang(
        f"{said} ({longest_s:.1f} s), and all have entered: their links or the engine are slow, or hang.", (), False
    )


def _late(worker: int, entry: Entry, entries: Mapping[int, Entry]) -> set[int]:
    """Return the workers that have not entered what `worker` waits in."""
    return {
        member
        for call in entry.waits
        for member in call.members
        if member != worker and member in entries and entries[member].entered.get(call.lane, 0) < call.number
    }


def _is_crossed(late: Mapping[int, set[int]]) -> bool:
    """Return whether some workers wait for each other in a circle, so that none of them can be the first."""
    left = {worker: set(others) for worker, others in late.items() if others}
    while free := [worker for worker, others in left.items() if not others & set(left)]:
        for worker in free:  # it waits for nobody who waits for somebody
            del left[worker]
    return bool(left)


def _is_mixed(waiting: Mapping[int, Entry]) -> bool:
    """Return whether one call of one lane is another collective, or one of another shape, on different workers."""
    seen: dict[tuple[str, int], tuple[str, str]] = {}
    for entry in waiting.values():
        for call in entry.waits:
            said = (call.what, call.detail)
            if call.number and seen.setdefault((call.lane, call.number), said) != said:
                return True
    return False


def _held_up(entries: Mapping[int, Entry], blamed: Sequence[int]) -> str:
    texts: dict[str, list[int]] = {}
    for worker in blamed:
        texts.setdefault(_where(entries[worker]), []).append(worker)
    return ", ".join(f"{_names(workers)} {_verb(workers, text)}" for text, workers in list(texts.items())[:_MOST_NAMED])


def _where(entry: Entry) -> str:
    if entry.silence:
        return f"{entry.silence}{f', last seen in {entry.place}' if entry.place else ''}"
    return f"is in {entry.place or 'a place that cannot be told'} ({entry.still_s:.1f} s)"


def _who_waits(entries: Mapping[int, Entry], workers: Iterable[int], before: str, *, with_place: bool = False) -> str:
    """Return who waits in what: "the others wait in all-reduce #1204, bucket 7"; empty if nobody does."""
    texts: dict[str, list[int]] = {}
    for worker in workers:
        entry = entries[worker]
        if entry.is_waiting:
            place = f" at {entry.place}" if with_place and entry.place else ""
            texts.setdefault(f"{_call(entry)}{place}", []).append(worker)
    if not texts:
        return ""
    if before and len(texts) == 1:
        text, waiting = next(iter(texts.items()))
        return f"{before}{f'worker {waiting[0]} waits' if len(entries) == 2 else 'the others wait'} in {text}"
    named = [
        f"{_names(some)} wait{'s' if len(some) == 1 else ''} in {text}"
        for text, some in list(texts.items())[:_MOST_NAMED]
    ]
    return before + ", ".join(named)


def _call(entry: Entry) -> str:
    """Return what a worker waits in: the first of its calls, for it is the oldest."""
    call = entry.waits[0]
    number = f" #{call.number}" if call.number else ""
    step = f" (step {entry.step})" if entry.step else ""
    return f"{call.what}{number}{f', {call.detail}' if call.detail else ''}{step}"


def _names(workers: Sequence[int]) -> str:
    if len(workers) == 1:
        return f"worker {workers[0]}"
    shown = [str(worker) for worker in workers[:8]] + (["..."] if len(workers) > 8 else [])
    return f"workers {', '.join(shown[:-1])} and {shown[-1]}"


def _verb(workers: Sequence[int], text: str) -> str:
    return text if len(workers) == 1 else text.replace("is ", "are ", 1).replace("has ", "have ", 1)

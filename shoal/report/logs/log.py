"""What one worker's event log says, and the values in it, taken with distrust (reading.py reads the files)."""

import json
import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from shoal.core.events import LATER_PARTS, STEP_PARTS
from shoal.report.logs.facts import Call, Fault, LoadingOver, MemoryOver, Saved, Shares, TraceFile

MOST, LEAST = 1e18, 1e-18
"""No worker measures more of anything, be it seconds or bytes, or less and not nothing: sums and ratios stay finite."""
_LATER = dict.fromkeys(LATER_PARTS, 0.0)


class Step(NamedTuple):
    """One step of one worker."""

    loss: float | None
    samples: float
    weight: float
    batch_weight: float
    """Of the global batch; 0 where the log does not say."""
    total_s: float
    """The whole step, data loading included."""
    parts_s: tuple[float, ...]
    """In the order of `STEP_PARTS`."""


@dataclass
class WorkerLog:
    """What one worker wrote. Where it wrote a step twice, as a resumed run does, the later one counts."""

    rank: int
    present: bool = False
    steps: dict[int, Step] = field(default_factory=dict)
    """Empty where the run's logs are large: the steps are in columns then (columns.py)."""
    num_steps: int = 0
    """How many steps it holds."""
    first_step: int | None = None
    last_step: int | None = None
    evals: dict[int, dict[str, float | None]] = field(default_factory=dict)
    staging: dict[str, str] = field(default_factory=dict)
    """Where each pack of the job was read, and why."""
    calls: dict[tuple[str, str, str, int], Call] = field(default_factory=dict)
    """What was communicated, by op, algorithm, link and bytes of a call."""
    calls_steps: int = 0
    """In how many steps."""
    loading: list[LoadingOver] = field(default_factory=list)
    saved: list[Saved] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    memory: dict[int, MemoryOver] = field(default_factory=dict)
    traces: dict[int, TraceFile] = field(default_factory=dict)
    shares: list[Shares] = field(default_factory=list)
    ended: bool = False
    peak_bytes: int | None = None
    state_bytes: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    """The worker's last words."""
    first_time_s: float | None = None
    last_time_s: float | None = None
    damaged_lines: int = 0
    half_written: bool = False
    unreadable: str = ""
    """Why the file is there and cannot be read; empty when it can."""

    @property
    def lacking_steps(self) -> int:
        """How many steps are missing between the first and the last one."""
        if self.first_step is None or self.last_step is None:
            return 0
        return self.last_step - self.first_step + 1 - self.num_steps


def step_of(event: dict[str, Any]) -> tuple[int, Step] | None:
    """Return the number of a step event and what it says; None where it makes no sense."""
    step = whole(event.get("step"))
    values = [amount(event.get(name, _LATER.get(name))) for name in ("samples", "weight", "step_s", *STEP_PARTS)]
    known = [value for value in values if value is not None]
    if step is None or len(known) < len(values):
        return None
    samples, weight, total_s, *parts_s = known
    batch_weight = amount(event.get("batch_weight")) or 0.0
    return step, Step(number(event.get("loss")), samples, weight, batch_weight, total_s, tuple(parts_s))


def note_time(log: WorkerLog, time: Any) -> None:
    """Take in the time of an event."""
    time_s = amount(time)
    if time_s is not None:
        log.first_time_s = time_s if log.first_time_s is None else log.first_time_s
        log.last_time_s = time_s


def parsed(line: bytes) -> dict[str, Any]:
    """Return the JSON object of a line, empty where it is damaged or another value."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def number(value: Any) -> float | None:
    """Return `value` when it is a finite number, otherwise None."""
    if type(value) not in (int, float):  # not isinstance: True is no number here
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number too large for a float
        return None


def amount(value: Any) -> float | None:
    """Return `value` when it is a number of seconds, bytes or samples that can be measured, otherwise None."""
    found = number(value)
    if found is None or abs(found) > MOST:
        return None
    return found if abs(found) >= LEAST else 0.0


def whole(value: Any) -> int | None:
    """Return `value` when it is a whole number that 64 bits hold, otherwise None."""
    return value if type(value) is int and abs(value) < 2**63 else None


def clean(text: object) -> str:
    """Return `text` without what a terminal obeys (escape codes) or UTF-8 cannot hold (lone surrogates)."""
    words = str(text)
    if words.isprintable():
        return words
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in words)

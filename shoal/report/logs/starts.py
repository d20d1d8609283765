"""The starts of a run that was gone on with: why each ended, after which step the next went on, and what that cost.

1. When a run is gone on with, its logs are put aside into events/attempt-N, and what they say of the steps that stay
   stands again at the beginning of the new ones (core/run_folder.py). So a log is lines of earlier starts, then one of
   kind `start`, then its own.
2. Where its own begin is told by the time of the last line put aside, and found by halving the file: a log may have
   gigabytes, and a few lines of it are asked for.
3. The starts of a job of Slurm are in slurm/starts.jsonl, also those of which no worker came up.

Example: attempt-1 ends with step 343, and the words that it was stopped by SIGTERM. The log after it begins with steps
1 to 340, then says `start`, an hour later: gone on after step 340, and 3 steps were lost.
"""

import itertools
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shoal.core.run_folder import RunFolder
from shoal.report.logs.facts import Fault
from shoal.report.logs.log import amount, clean, parsed, whole

_NEAR_BYTES = 64 * 1024
"""How much is read where something is looked for: some hundred lines."""
_MOST_STARTS = 1000
_ECHO = "PeerLost"
"""What a worker says that has ended because another has."""


class _Own(NamedTuple):
    """How the own part of a log begins."""

    began_s: float
    after_step: int
    """The last step of the part before it; 0 where there is none."""
    first_step_s: float | None
    """When its first own step was done."""


class _End(NamedTuple):
    """How a log ends."""

    time_s: float
    step: int
    error: dict[str, Any]
    """The worker's last words, if it had any."""
    is_done: bool


@dataclass(frozen=True)
class _Start:
    """One start of a run, of which a worker came up."""

    owns: tuple[_Own, ...]
    ends: tuple[_End, ...]

    @property
    def began_s(self) -> float:
        return min(own.began_s for own in self.owns)

    @property
    def after_step(self) -> int:
        return max(own.after_step for own in self.owns)  # a worker that is new has none before it

    @property
    def last_step(self) -> int:
        return max(end.step for end in self.ends)

    @property
    def why(self) -> str:
        """Why it ended: the earliest last words that are no echo of another worker's."""
        said = [end for end in self.ends if end.error]
        if said:
            error = min(said, key=lambda end: (end.error.get("type") == _ECHO, end.time_s)).error
            kind = f"{error.get('type')}: " if error.get("type") not in ("Stopped", _ECHO) else ""
            return re.split(r"\.\s|\n", clean(f"{kind}{error.get('message', '')}"))[0].rstrip(".")
        return "it was done" if all(end.is_done for end in self.ends) else "it was cut off, and no worker said why"


class _Job(NamedTuple):
    """A start of a job of Slurm."""

    name: str
    time_s: float
    step: int


def restarts(run: RunFolder) -> list[Fault]:
    """Return each start of the run but the first, in order: what ended the one before, and how it went on."""
    jobs, starts = _jobs(run.slurm / "starts.jsonl"), _starts(run.events)
    found = [_restart(before, after, jobs) for before, after in itertools.pairwise(starts)]
    return sorted([*found, *_in_vain(jobs, starts)], key=lambda fault: fault.time_s)


def _restart(before: _Start, after: _Start, jobs: list[_Job]) -> Fault:
    done_s = [own.first_step_s for own in after.owns if own.first_step_s is not None]
    ended_s = max(end.time_s for end in before.ends)
    by_job = next((f" by job {job.name}" for job in reversed(jobs) if job.time_s <= after.began_s), "")
    went_on = f"gone on after step {after.after_step:,}" if after.after_step else "begun from the first step"
    return Fault(
        time_s=after.began_s,
        step=after.after_step,
        kind="start",
        sentence=f"Started again{by_job}, and {went_on}; before, it came to step {before.last_step:,}: {before.why}.",
        recovery_s=max(0.0, min(done_s) - ended_s) if done_s else None,
        lost_steps=max(0, before.last_step - after.after_step),
    )


def _in_vain(jobs: list[_Job], starts: list[_Start]) -> Iterator[Fault]:
    """Yield the starts of jobs of which no worker came up before the next."""
    for job, following in itertools.pairwise(jobs):
        if not any(job.time_s <= start.began_s < following.time_s for start in starts):
            yield Fault(job.time_s, job.step, "start", f"Started by job {job.name}, and no worker came up.")


def _starts(events: Path) -> list[_Start]:
    """Return all starts of which a worker came up, in order."""
    names = [re.fullmatch(r"attempt-(\d{1,6})", path.name) for path in events.glob("attempt-*")]
    numbers = sorted(int(name[1]) for name in names if name)
    if not numbers:  # it was started once: its logs need not be looked into for that
        return []
    found, since_s = [], dict[str, float]()
    for folder in [*(events / f"attempt-{number}" for number in numbers[-_MOST_STARTS:]), events]:
        paths = [path for path in folder.glob("rank-*.jsonl") if re.fullmatch(r"rank-\d{1,6}\.jsonl", path.name)]
        ends = {path.name: end for path in sorted(paths) if (end := _end_of(path)) is not None}
        parts = [_own_part(folder / name, since_s.get(name, -math.inf)) for name in ends]
        owns = tuple(own for own in parts if own is not None)
        if owns:
            found.append(_Start(owns, tuple(ends.values())))
        since_s |= {name: end.time_s for name, end in ends.items()}
    return found


def _end_of(path: Path) -> _End | None:
    """Return how the log ends; None where that cannot be read."""
    try:
        with path.open("rb") as file:
            events = list(_events_from(file, max(0, file.seek(0, os.SEEK_END) - _NEAR_BYTES)))
    except OSError:
        return None
    times = [time_s for event in events if (time_s := amount(event.get("time"))) is not None]
    steps = [step for event in events if event["kind"] == "step" and (step := whole(event.get("step"))) is not None]
    errors = [event for event in events if event["kind"] == "error"]
    if not times:
        return None
    return _End(times[-1], steps[-1] if steps else 0, errors[-1] if errors else {}, events[-1]["kind"] == "end")


def _own_part(path: Path, since_s: float) -> _Own | None:
    """Return how the part of a log begins that is later than `since_s`; None where there is none."""
    try:
        with path.open("rb") as file:
            place = max(0, _place_of(file, since_s) - _NEAR_BYTES)  # some steps before it
            return _own_of(_events_from(file, place), since_s)
    except OSError:
        return None


def _own_of(events: Iterator[dict[str, Any]], since_s: float) -> _Own | None:
    after_step, began_s = 0, None
    for event in events:
        time_s, is_step = amount(event.get("time")), event["kind"] == "step"
        if began_s is None and event["kind"] == "start" and time_s is not None and time_s > since_s:
            began_s = time_s
        elif is_step and began_s is not None:
            return _Own(began_s, after_step, time_s)
        elif is_step:
            after_step = whole(event.get("step")) or after_step
    return None if began_s is None else _Own(began_s, after_step, None)


def _place_of(file: BinaryIO, since_s: float) -> int:
    """Return a place not far before the first line that is later than `since_s`."""
    low, high = 0, file.seek(0, os.SEEK_END)
    while high - low > _NEAR_BYTES:
        middle = (low + high) // 2
        time_s = amount(next(_events_from(file, middle), {}).get("time"))
        low, high = (middle, high) if time_s is not None and time_s <= since_s else (low, middle)
    return low


def _events_from(file: BinaryIO, place: int) -> Iterator[dict[str, Any]]:
    """Yield the events of the whole lines from `place` on; damaged ones are passed over."""
    file.seek(place)
    if place:
        file.readline()  # the rest of a line
    for line in file:
        event = parsed(line) if line.endswith(b"\n") else {}
        if isinstance(event.get("kind"), str):
            yield event


def _jobs(path: Path) -> list[_Job]:
    try:
        lines = path.read_bytes().splitlines()[-_MOST_STARTS:]
    except OSError:
        return []
    found = []
    for said in map(parsed, lines):
        time_s, step = amount(said.get("time")), whole(said.get("step"))
        if time_s is not None and step is not None:
            found.append(_Job(clean(said.get("job", "")), time_s, step))
    return found

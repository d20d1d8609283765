"""What a run of stop_and_kill.py has counted: from its workers' events, held against the samples that they computed.

1. A worker's events are cut where it began anew ("start"): segments. Each is of a generation, as that event says.
2. A step counts as the last generation has done it: what an earlier one did of the same or later steps was given up.
3. Each worker has written down which samples went into each forward pass (hundred_job.py), before it.

Then, of every step:

    exact     all-reduce, local: the samples that its last generation computed are those of the global batch, each once
    listed    deadline, server: what the step weighs is what those brought who took part, each counted once
    tickets   asynchronous servers: every part was counted once; one without an event was its worker's last act
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.faults import hundred_model
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.data.order import order
from shoal.data.partition import global_batch


@dataclass
class Segment:
    """What one process did in one generation."""

    worker: int
    process: int
    began: float
    generation: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    seen: dict[int, list[int]] = field(default_factory=dict)
    """The samples of its forward passes, by step."""

    def brought(self, event: dict[str, Any] | None, step: int) -> float:
        """Return what it has brought to a step: as its event says, or, where it died before that, its last samples."""
        if event is not None:
            return float(event["weight"])
        return float(len(self.seen[max(self.seen)])) if self.seen and max(self.seen) <= step else 0.0


@dataclass(frozen=True)
class Counted:
    """What a run has counted."""

    samples: int
    expected: int
    generations: int
    wrong: list[str]


def count(folder: RunFolder, notes: Path, *, kind: str, steps: int) -> Counted:
    """Return what the run in `folder` has counted, and what is wrong with it."""
    generations = generations_of(segments_of(folder))
    put_seen(generations, notes)
    check = {"exact": exact, "listed": listed, "tickets": tickets}[kind]
    ends = [generations[number:] for number in range(1, len(generations) + 1)]
    limits = [min((first_of(later) for later in after), default=steps + 1) for after in ends]
    wrong, total = [], 0
    for step in range(1, steps + 1):
        doing = [g for g, limit in zip(generations, limits, strict=True) if step < limit and has_done(g, step, kind)]
        if not doing:
            wrong.append(f"step {step} was not done")
            continue
        samples, what = check(doing[-1], step)
        total += samples
        wrong += [f"step {step}: {what}"] if what else []
    return Counted(total, sum(len(batch(step)) for step in range(1, steps + 1)), len(generations), wrong)


def segments_of(folder: RunFolder) -> list[Segment]:
    """Return what the processes did, in the order in which they began."""
    segments: list[Segment] = []
    for path in sorted(folder.events.glob("rank-*.jsonl")):
        worker = int(path.stem.removeprefix("rank-"))
        for event in EventReader(path).poll():
            if event["kind"] == "start":
                segments.append(Segment(worker, event["pid"], event["time"], event["generation"]))
            elif event["kind"] == "step":
                mine = [each for each in segments if each.worker == worker]
                mine[-1].steps.append(event)
    return sorted(segments, key=lambda segment: segment.began)


def generations_of(segments: list[Segment]) -> list[list[Segment]]:
    """Return the segments by generation, in their order; those in which nothing was done are left out."""
    numbers = sorted({segment.generation for segment in segments})
    generations = [[segment for segment in segments if segment.generation == number] for number in numbers]
    return [generation for generation in generations if any(segment.steps for segment in generation)]


def put_seen(generations: list[list[Segment]], notes: Path) -> None:
    """Give each segment the samples that its process has computed in its time."""
    segments = [segment for generation in generations for segment in generation]
    for path in notes.glob("seen-*.jsonl"):
        process = int(path.stem.removeprefix("seen-"))
        mine = [segment for segment in segments if segment.process == process]
        for line in path.read_text().splitlines():
            try:
                noted = json.loads(line)
            except ValueError:  # a kill has cut it off: it was never trained on
                continue
            within = [segment for segment in mine if segment.began <= noted["time"]]
            if within:
                within[-1].seen.setdefault(noted["step"], []).extend(noted["samples"])


def batch(step: int) -> list[int]:
    """Return the samples of the global batch of `step`, from 1."""
    where = global_batch(step - 1, num_samples=hundred_model.NUM_SAMPLES, batch_size=hundred_model.BATCH)
    positions = np.arange(where.first, where.last)
    return [int(i) for i in order(hundred_model.NUM_SAMPLES, positions, seed=0, epoch=where.epoch)]


def first_of(generation: list[Segment]) -> int:
    """Return the first step that a generation has done."""
    return min(event["step"] for segment in generation for event in segment.steps)


def met_in(event: dict[str, Any]) -> int:
    """Return the step that a worker's samples went into: a later one than meant, if it was late."""
    return int(event["step"]) + int(event.get("staleness", 0))


def has_done(generation: list[Segment], step: int, kind: str) -> bool:
    """Return whether a generation has done `step`."""
    which: Callable[[dict[str, Any]], int] = met_in if kind == "listed" else lambda event: int(event["step"])
    return any(which(event) == step for segment in generation for event in segment.steps)


def exact(generation: list[Segment], step: int) -> tuple[int, str]:
    """Return how many samples a step had, and what is wrong with them, if anything."""
    seen = sorted(sample for segment in generation for sample in segment.seen.get(step, []))
    return len(seen), "" if seen == sorted(batch(step)) else f"{len(seen)} samples, not the {len(batch(step))} of it"


def listed(generation: list[Segment], step: int) -> tuple[int, str]:
    """Return how much a step weighed, and what is wrong with that, if anything."""
    own = {s.worker: [event for event in s.steps if met_in(event) == step] for s in generation}
    twice = [worker for worker, events in own.items() if len(events) > 1]
    told = {(event["met_weight"], tuple(event["took_part"])) for events in own.values() for event in events}
    if twice or len(told) > 1:
        return 0, f"counted twice for {twice}" if twice else f"its workers say different things: {sorted(told)}"
    weight, took_part = told.pop()
    brought = [
        s.brought(own[s.worker][0] if own[s.worker] else None, step) for s in generation if s.worker in took_part
    ]
    is_right = sum(brought) == weight and weight > 0
    return int(weight), "" if is_right else f"it weighs {weight:g}, and {took_part} brought {brought}"


def tickets(generation: list[Segment], step: int) -> tuple[int, str]:
    """Return how many samples of a step were counted, and what is wrong with its parts, if anything."""
    events = [event for segment in generation for event in segment.steps if event["step"] == step]
    parts = [event["part"] for event in events]
    samples, whole = sum(event["samples"] for event in events), len(batch(step))
    if len(set(parts)) < len(parts):
        return samples, f"parts {sorted(parts)}: one was counted twice"
    last = [s.seen[step] for s in generation if step in s.seen and step not in {event["step"] for event in s.steps}]
    missing = whole - samples
    if missing and missing not in {sum(len(some) for some in last), *(len(some) for some in last)}:
        return samples, f"{samples} of {whole} samples"
    return whole, ""

"""One run of hundred.py under faults, held against the run that nothing disturbed.

1. `shoal train` trains the job under a plan, with faults in its environment (fault/inject.py).
2. Every worker's events are cut where it began a generation anew (the event "start"). A step is as it was done last.
3. Losses: of every event of every step, also of steps that were done twice.
4. Samples: every worker has written down which ones went into its forward passes. Those of a step's last generation
   must be those of the undisturbed run, each once.
5. A recovery lasts from a kill to the first step that is done in a generation which began after it. Steps are lost if
   that step had been done before.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.faults.hundred_model import STEP_S
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault import inject
from shoal.fault.inject import Fault
from shoal.spec.plan import Checkpoints, Plan

JOB = Path(__file__).with_name("hundred_job.py")
CHECKPOINT_STEPS = 20
TOLERANCE = 1e-5  # float32: sums over other numbers of workers are rounded otherwise
_ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Segment:
    """What one worker did in one generation."""

    worker: int
    process: int
    began: float
    steps: dict[int, tuple[float, float]]
    """By step: when it was done, and its loss."""


@dataclass(frozen=True)
class Trained:
    """A run that has ended."""

    exit_code: int
    said: str
    segments: list[Segment]
    seen: dict[int, list[tuple[float, list[int]]]]
    """By step: when samples went into a forward pass, and which."""
    struck: list[dict[str, Any]]

    @property
    def losses(self) -> dict[int, float]:
        """The loss of each step, as it was done last."""
        done = [(seg.began, step, loss) for seg in self.segments for step, (_, loss) in seg.steps.items()]
        return {step: loss for _, step, loss in sorted(done)}

    def samples(self, step: int) -> list[int]:
        """Return the samples of `step`, in order, from the generation that did it last."""
        began = max(segment.began for segment in self.segments if step in segment.steps)
        return sorted(sample for moment, some in self.seen.get(step, []) if moment > began for sample in some)


@dataclass(frozen=True)
class Recovery:
    """What one kill has cost."""

    workers: int
    worker: int
    point: str
    step: int
    seconds: float | None
    """None: no step was left to be done."""
    lost_steps: int
    others_left: bool
    """Whether anybody was alive who knew the state; otherwise the run began anew from memory or its last checkpoint."""


def train(
    plan: Plan, *, pack: Path, steps: int, folder: Path, faults: Sequence[Fault] = (), timeout_s: float = 150.0
) -> Trained:
    """Train the job on the samples in `pack`, in a new folder, under `faults`, and return what came of it."""
    notes = folder / "faults"
    notes.mkdir(parents=True)
    plan = dataclasses.replace(plan, checkpoint=Checkpoints(every_steps=CHECKPOINT_STEPS), staging="off")
    write_toml(folder / "plan.toml", plan)
    command = [sys.executable, "-m", "shoal", "train", str(JOB), "--plan", str(folder / "plan.toml")]
    command += ["--steps", str(steps), "--runs", str(folder), "--name", "run", "--json"]
    env = {**os.environ, "SHOAL_BENCH_PACK": str(pack), "SHOAL_BENCH_SEEN": str(notes)}
    env["PYTHONPATH"] = str(_ROOT)
    if faults:
        env |= {**inject.environment(faults, folder=notes), "SHOAL_BENCH_STEP_S": str(STEP_S)}
    try:
        done = subprocess.run(
            command, check=False, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout_s
        )
        code, said = done.returncode, done.stderr
    except subprocess.TimeoutExpired as expired:
        code, said = -1, f"not at its end after {timeout_s:g} s\n{(expired.stderr or b'').decode(errors='replace')}"
    return Trained(code, said, segments_of(RunFolder(folder / "run")), seen_in(notes), inject.struck(notes))


def segments_of(folder: RunFolder) -> list[Segment]:
    """Return what the workers did, generation by generation."""
    segments: list[Segment] = []
    for path in sorted(folder.events.glob("rank-*.jsonl")):
        worker = int(path.stem.removeprefix("rank-"))
        for event in EventReader(path).poll():
            if event["kind"] == "start":
                segments.append(Segment(worker, event["pid"], event["time"], {}))
            elif event["kind"] == "step":
                segments[-1].steps[event["step"]] = (event["time"], event["loss"])
    return segments


def seen_in(notes: Path) -> dict[int, list[tuple[float, list[int]]]]:
    """Return the samples of all forward passes; a line that a kill has cut off was never trained on."""
    seen: dict[int, list[tuple[float, list[int]]]] = {}
    for path in notes.glob("seen-*.jsonl"):
        for line in path.read_text().splitlines():
            noted = json.loads(line)
            seen.setdefault(noted["step"], []).append((noted["time"], noted["samples"]))
    return seen


def differences(run: Trained, reference: Trained, *, steps: int) -> list[str]:
    """Return what is not as in the undisturbed run: sentences; none if all is."""
    wrong = []
    if run.exit_code:
        wrong.append(f"it ended with exit code {run.exit_code}: {run.said.strip()[-1500:]}")
    expected = reference.losses
    missing = [step for step in range(1, steps + 1) if step not in run.losses]
    if missing:
        wrong.append(f"{len(missing)} steps were not done, the first of them step {missing[0]}")
    for segment in run.segments:
        for step, (_, loss) in segment.steps.items():
            if abs(loss - expected[step]) > TOLERANCE * abs(expected[step]):
                wrong.append(f"step {step} of worker {segment.worker}: loss {loss}, undisturbed {expected[step]}")
    for step in run.losses:
        if run.samples(step) != reference.samples(step):
            wrong.append(f"step {step}: {len(run.samples(step))} samples, undisturbed {len(reference.samples(step))}")
    return wrong


def largest_difference(run: Trained, reference: Trained) -> float:
    """Return by how much, relatively, the loss of any step is off."""
    expected = reference.losses
    return max(abs(loss - expected[step]) / abs(expected[step]) for step, loss in run.losses.items())


def recoveries(run: Trained, *, workers: int) -> list[Recovery]:
    """Return what each kill has cost."""
    found = []
    useful = [segment for segment in run.segments if segment.steps]  # others were disturbed before their first step
    for note in run.struck:
        earlier = _last([segment for segment in useful if segment.began <= note["time"]])
        later = [segment for segment in useful if segment.began > note["time"]]
        reached = max((step for segment in earlier for step in segment.steps), default=0)
        done = [(moment, step) for segment in later for step, (moment, _) in segment.steps.items()]
        moment, step = min(done, default=(None, reached + 1))
        found.append(
            Recovery(
                workers=workers,
                worker=note["worker"],
                point=note["point"],
                step=note["step"],
                seconds=None if moment is None else moment - note["time"],
                lost_steps=max(0, reached + 1 - step),
                others_left=not done or not reached or bool(_processes(earlier) & _processes(later)),
            )
        )
    return found


def _last(segments: list[Segment]) -> list[Segment]:
    """Return those of the last generation: those that began with the same step as the last to begin."""
    first = min(max(segments, key=lambda segment: segment.began).steps) if segments else 0
    return [segment for segment in segments if min(segment.steps) == first]


def _processes(segments: list[Segment]) -> set[int]:
    return {segment.process for segment in segments}

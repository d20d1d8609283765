"""One worker's event log, read with distrust: whatever cannot be used is left out, and said."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shoal.core.events import STEP_PARTS, EventReader


class Step(NamedTuple):
    """One step of one worker."""

    loss: float | None
    samples: float
    weight: float
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
    evals: dict[int, dict[str, float | None]] = field(default_factory=dict)
    staging: dict[str, str] = field(default_factory=dict)
    """Where each pack of the job was read, and why."""
    ended: bool = False
    peak_bytes: int | None = None
    error: str | None = None
    """The worker's last words."""
    first_time_s: float | None = None
    last_time_s: float | None = None
    damaged_lines: int = 0
    half_written: bool = False
    unreadable: str = ""
    """Why the file is there and cannot be read; empty when it can."""

    @property
    def last_step(self) -> int | None:
        """The highest step it holds."""
        return max(self.steps, default=None)

    @property
    def lacking_steps(self) -> int:
        """How many steps are missing between the first and the last one."""
        return max(self.steps) - min(self.steps) + 1 - len(self.steps) if self.steps else 0


def read_log(path: Path, rank: int) -> WorkerLog:
    """Return what `path` holds of worker `rank`; no state of the file makes this fail."""
    log = WorkerLog(rank)
    reader = EventReader(path)
    try:
        log.present = path.exists()
        events = reader.poll()
        log.half_written = log.present and _ends_inside_a_line(path)
    except OSError as error:
        log.unreadable = clean(error.strerror or str(error))
        return log
    for event in events:
        if not _take(log, event):
            log.damaged_lines += 1
    log.damaged_lines += reader.damaged_lines
    return log


def number(value: Any) -> float | None:
    """Return `value` when it is a finite number, otherwise None."""
    if type(value) not in (int, float):  # not isinstance: True is no number here
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number too large for a float
        return None


def clean(text: object) -> str:
    """Return `text` without what a terminal obeys (escape codes) or UTF-8 cannot hold (lone surrogates)."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in str(text))


def _ends_inside_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, 2) == 0:
            return False
        file.seek(-1, 2)
        return file.read(1) != b"\n"


def _take(log: WorkerLog, event: dict[str, Any]) -> bool:
    """Add one event to `log`; return whether it made sense. Kinds of a later version are passed over."""
    time_s = number(event.get("time"))
    if time_s is not None:
        log.first_time_s = time_s if log.first_time_s is None else log.first_time_s
        log.last_time_s = time_s
    take = _TAKERS.get(event["kind"]) if isinstance(event["kind"], str) else None
    return take(log, event) if take else isinstance(event["kind"], str)


def _take_start(log: WorkerLog, event: dict[str, Any]) -> bool:  # noqa: ARG001
    log.ended, log.error = False, None  # a worker that starts again has left its failure behind
    return True


def _take_step(log: WorkerLog, event: dict[str, Any]) -> bool:
    step = event.get("step")
    values = [number(event.get(name)) for name in ("samples", "weight", "step_s", *STEP_PARTS)]
    known = [value for value in values if value is not None]
    if not isinstance(step, int) or isinstance(step, bool) or len(known) < len(values):
        return False
    samples, weight, total_s, *parts_s = known
    log.steps[step] = Step(number(event.get("loss")), samples, weight, total_s, tuple(parts_s))
    return True


def _take_eval(log: WorkerLog, event: dict[str, Any]) -> bool:
    step, metrics = event.get("step"), event.get("metrics")
    if not isinstance(step, int) or isinstance(step, bool) or not isinstance(metrics, dict):
        return False
    log.evals[step] = {clean(name): number(value) for name, value in metrics.items()}
    return True


def _take_staging(log: WorkerLog, event: dict[str, Any]) -> bool:
    if not all(isinstance(event.get(name), str) for name in ("field", "source", "path", "why")):
        return False
    where = f"staged to {event['path']}: " if event.get("is_staged") is True else ""
    log.staging[clean(event["field"])] = clean(f"{event['source']}: {where}{event['why']}")
    return True


def _take_error(log: WorkerLog, event: dict[str, Any]) -> bool:
    log.error = clean(f"{event.get('type', 'error')}: {event.get('message', '')}")
    return True


def _take_end(log: WorkerLog, event: dict[str, Any]) -> bool:
    peak = number(event.get("peak_bytes"))
    log.ended, log.peak_bytes = True, None if peak is None else int(peak)
    return True


_TAKERS = {
    "start": _take_start,
    "step": _take_step,
    "eval": _take_eval,
    "staging": _take_staging,
    "error": _take_error,
    "end": _take_end,
}

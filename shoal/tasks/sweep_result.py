"""What came of a sweep: its trials, the best of them, and sweep.json, which holds both."""

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.core.errors import JobError
from shoal.core.files import write_whole
from shoal.tasks.sweep_study import why_failed

if TYPE_CHECKING:
    import optuna

SWEEP_JSON = "sweep.json"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One trial."""

    number: int
    state: str
    """complete, pruned, fail, running or waiting."""
    value: float | None
    """Of one that was pruned, the last that it reported."""
    parameters: dict[str, Any]
    seconds: float | None
    reason: str
    """Why it failed, or ""."""


@dataclass(frozen=True, kw_only=True)
class SweepResult:
    """A sweep as it stands."""

    file: str
    folder: Path
    is_maximized: bool
    wanted: int
    trials: tuple[Trial, ...]

    def count(self, state: str) -> int:
        """Return how many trials are in `state`."""
        return sum(trial.state == state for trial in self.trials)

    @property
    def done(self) -> int:
        """How many trials have a result: complete or pruned."""
        return self.count("complete") + self.count("pruned")

    def ranked(self) -> list[Trial]:
        """Return the complete trials, best first; of equals, the earlier."""
        complete = [trial for trial in self.trials if trial.state == "complete" and trial.value is not None]
        sign = -1.0 if self.is_maximized else 1.0
        return sorted(complete, key=lambda trial: (sign * (trial.value or 0.0), trial.number))

    @property
    def best(self) -> Trial | None:
        """The best complete trial."""
        return next(iter(self.ranked()), None)

    def as_json(self) -> dict[str, Any]:
        """Return all of it for `--json` and sweep.json."""
        return {
            "file": self.file,
            "folder": str(self.folder),
            "direction": "maximize" if self.is_maximized else "minimize",
            "wanted": self.wanted,
            "complete": self.count("complete"),
            "pruned": self.count("pruned"),
            "failed": self.count("fail"),
            "best": _plain(self.best) if self.best else None,
            "trials": [_plain(trial) for trial in self.trials],
        }

    def write(self) -> Path:
        """Write sweep.json and return its path."""
        path = self.folder / SWEEP_JSON
        write_whole(path, json.dumps(self.as_json(), allow_nan=False, indent=1) + "\n")
        return path


def read_result(study: "optuna.Study", *, file: Path, folder: Path, is_maximized: bool, wanted: int) -> SweepResult:
    """Return the sweep as its journal has it now."""
    notes = study.user_attrs
    trials = tuple(_trial(trial, why_failed(notes, trial)) for trial in study.get_trials(deepcopy=False))
    return SweepResult(file=file.name, folder=folder, is_maximized=is_maximized, wanted=wanted, trials=trials)


def refuse_vain(result: SweepResult) -> None:
    """Raise JobError if trials have failed, and not one has come to a result."""
    if result.done == 0 and result.count("fail"):
        reasons = [trial.reason for trial in result.trials if trial.reason]
        last = f" The last: {reasons[-1]}" if reasons else ""
        raise JobError(f"all {result.count('fail')} trials of {result.file} so far failed.{last}")


def _trial(trial: "optuna.trial.FrozenTrial", reason: str) -> Trial:
    value = trial.values[0] if trial.values else None
    return Trial(
        number=trial.number,
        state=trial.state.name.lower(),
        value=value,
        parameters=dict(trial.params),
        seconds=trial.duration.total_seconds() if trial.duration is not None else None,
        reason=reason,
    )


def _plain(trial: Trial) -> dict[str, Any]:
    """Return the trial for JSON, which has no infinity."""
    found = {name: _finite(value) for name, value in asdict(trial).items()}
    return found | {"parameters": {name: _finite(value) for name, value in trial.parameters.items()}}


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value

"""Calibration from run folders: how much longer computing and waiting took than predicted, and rates slower by that.

A run keeps what its plan was predicted to cost, and its workers log what each step took. The slowest worker's typical
step, without its data loading, is cut into waiting for communication and the rest; each over its prediction is a ratio.
The typical ratio over all runs divides the device's rates, and that of waiting those of the link inside the node.

Example: predicted 100 ms with 20 of them waiting, measured 130 with 30: rates are 80/100 and 20/30 of what they were.
"""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from shoal.core.errors import ConfigError
from shoal.core.events import EventReader
from shoal.core.fit import typical
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.planner.calibration.calibration import Calibration, constants_of, device_name
from shoal.planner.machine import Machine
from shoal.spec.plan import Plan, Predicted

_BUSY = ("forward_s", "backward_s", "bubble_s", "optimizer_s")
"""The parts of a step that `Predicted.step_s` counts, without communication."""


class RunTimes(NamedTuple):
    """A step of one run, in seconds without data loading."""

    predicted_busy_s: float
    predicted_comm_s: float
    busy_s: float
    comm_s: float

    @property
    def error(self) -> float:
        """How far off its prediction was."""
        return (self.predicted_busy_s + self.predicted_comm_s) / (self.busy_s + self.comm_s) - 1


def calibrate_runs(paths: Sequence[Path], machine: Machine) -> tuple[Calibration, Callable[[Path], float]]:
    """Return a calibration from the runs at `paths`, and what says how far a run's corrected prediction is off."""
    runs = [read_run(path) for path in paths]
    busy = statistics.median(run.busy_s / run.predicted_busy_s for run in runs)
    waits = [run.comm_s / run.predicted_comm_s for run in runs if run.predicted_comm_s > 0 and run.comm_s > 0]
    comm = statistics.median(waits) if waits else 1.0

    def error_of(path: Path) -> float:
        run = read_run(path)
        return (busy * run.predicted_busy_s + comm * run.predicted_comm_s) / (run.busy_s + run.comm_s) - 1

    known = constants_of(machine)
    constants = dataclasses.replace(
        known,
        matmul_fraction=known.matmul_fraction / busy,
        memory_bytes_per_s=known.memory_bytes_per_s / busy,
        operation_s=known.operation_s * busy,
        inside_bytes_per_s=known.inside_bytes_per_s / comm,
        inside_latency_s=known.inside_latency_s * comm,
    )
    calibration = Calibration(
        device=device_name(machine), fitted_on=tuple(str(path) for path in paths), rows=len(runs), constants=constants
    )
    return calibration, error_of


def read_run(path: Path) -> RunTimes:
    """Return what a step of the run at `path` took, beside what it was predicted to take."""
    folder = RunFolder.open(path)
    plan = read_toml(Plan, folder.plan_toml)
    if plan.predicted is None:
        raise ConfigError(f"{path} has no prediction in its plan.toml, so there is nothing to compare with.")
    workers = [_worker(folder, rank) for rank in range(plan.workers)]
    busy_s, comm_s = max((worker for worker in workers if worker), default=(0.0, 0.0))
    if busy_s <= 0:
        raise ConfigError(f"{path} has no steps in its event logs: only a run that took some can be calibrated from.")
    return RunTimes(_busy_s(plan.predicted), plan.predicted.comm_s, busy_s, comm_s)


def _busy_s(predicted: Predicted) -> float:
    return predicted.step_s - predicted.comm_s


def _worker(folder: RunFolder, rank: int) -> tuple[float, float] | None:
    """Return a worker's typical seconds in a step: busy, and waiting for communication."""
    events = EventReader(folder.events_of(rank)).poll()
    steps = [event for event in events if event.get("kind") == "step"]
    if not steps:
        return None
    comm_s = typical([step["comm_s"] for step in steps])
    return typical([sum(step[name] for name in _BUSY) for step in steps]), comm_s

"""`shoal plan --calibrate`: fit to measured steps, and say how far off the fit is on steps that it has not seen."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.planner.calibration.calibrate import as_calibration, fit, predict_s, rank_s
from shoal.planner.calibration.calibration import Calibration, Constants, constants_of
from shoal.planner.calibration.measured import Measured, read_rows
from shoal.planner.calibration.run_ratio import calibrate_runs, read_run
from shoal.planner.catalog import read_device, read_link
from shoal.planner.machine import Machine, machine_of
from shoal.spec.cluster import Cluster

FOLDS = 5
_LEAST_IN_A_RANKING = 4
"""Among three rows the first is always one of the three fastest."""


@dataclass(frozen=True)
class Errors:
    """How far predictions are from what was measured: |predicted / measured - 1|."""

    rows: int
    mean_abs_error: float
    worst_abs_error: float


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """Ways to train one model on the same devices with the same batch: is the one ranked first among the fastest?"""

    model: str
    rows: int
    place: int
    """The place by measured time of the row that is predicted to be the fastest."""
    behind: float
    """How much longer it takes than the fastest: 0.02 is 2%."""

    @property
    def among_three(self) -> bool:
        """Whether it is one of the three fastest measured."""
        return self.place <= 3


@dataclass(frozen=True, kw_only=True)
class CalibrationReport:
    """A fit, its error on the rows of the test, and on its own rows by cross-validation."""

    calibration: Calibration
    before: Constants
    """The constants as the catalog has them."""
    unfitted: Errors | None
    """How far off the rows of the fit were without it."""
    tested: Errors | None
    """On the rows of the test; without one, held out."""
    tested_files: dict[str, Errors]
    held_out: Errors | None
    """Each row predicted by a fit to the other parts; None where the rows are too few."""
    held_out_files: dict[str, Errors]
    rankings: tuple[Ranking, ...]
    """Of the test; without one, each by a fit to other models."""

    @property
    def helps(self) -> bool:
        """Whether it predicts rows that it has not seen better than no fit does; without such rows, it is believed."""
        if self.held_out is None or self.unfitted is None:
            return True
        return self.held_out.mean_abs_error < self.unfitted.mean_abs_error

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain JSON values."""
        held_out = None
        if self.held_out:
            held_out = {
                **dataclasses.asdict(self.held_out),
                "folds": self.calibration.folds,
                "files": {name: dataclasses.asdict(errors) for name, errors in self.held_out_files.items()},
            }
        tested = dataclasses.asdict(self.tested) if self.tested else {"rows": 0}
        return {
            "mean_abs_error": tested.get("mean_abs_error"),
            "worst_abs_error": tested.get("worst_abs_error"),
            "rows": tested["rows"],
            "files": {name: dataclasses.asdict(errors) for name, errors in self.tested_files.items()},
            "held_out": held_out,
            "unfitted": dataclasses.asdict(self.unfitted) if self.unfitted else None,
            "ranking": [dataclasses.asdict(each) | {"among_three": each.among_three} for each in self.rankings],
            "fitted_on": {"rows": self.calibration.rows, "files": list(self.calibration.fitted_on)},
            "device": self.calibration.device,
            "constants": dataclasses.asdict(self.calibration.constants),
            "constants_before": dataclasses.asdict(self.before),
        }


def calibrate_and_test(
    train: Sequence[Path], test: Sequence[Path] | None = None, *, machine: Machine | None = None
) -> CalibrationReport:
    """Return a fit of `machine` to the files or run folders of `train`, with its error on those of `test`.

    Rows of a CSV are those of GPUs: without a machine, or with one that has none, of 8 A100s of 80 GB a node with 4
    adapters of InfiniBand HDR. Run folders know their cluster; `machine` is the one that they were predicted with.
    """
    folders = [path for path in [*train, *(test or [])] if path.is_dir()]
    if folders:
        if len(folders) < len(train) + len(test or []):
            raise ConfigError("run folders and CSV files cannot be calibrated from together: give one kind.")
        return _from_runs(train, test or [], machine or _machine_of_run(train[0]))
    rows = [row for path in train for row in read_rows(path)]
    others = [row for path in test or [] for row in read_rows(path)]
    return _from_rows(rows, others, a100_nodes() if machine is None or machine.shared else machine)


def _machine_of_run(path: Path) -> Machine:
    return machine_of(read_toml(Cluster, RunFolder.open(path).cluster_toml))


def a100_nodes() -> Machine:
    """Return the machine of the public measurements: nodes of 8 A100s with NVLink, 4 adapters between them."""
    return Machine(
        device=read_device("a100-80"),
        per_node=8,
        inside=read_link("nvlink-3"),
        between=read_link("ib-hdr"),
        adapters=4,
    )


def held_out_machines(rows: Sequence[Measured], machine: Machine, *, by_model: bool = False) -> list[Machine]:
    """Return for each row a fit of `machine` to other rows: of 5 parts those it is not in, the same every time.

    `by_model` keeps the rows of a model in one part, so that one fit predicts all of them and has seen none.
    """
    names = [row.model if by_model else str(number) for number, row in enumerate(rows)]
    order = sorted(set(names))
    random.Random(0).shuffle(order)  # noqa: S311
    part = {name: number % FOLDS for number, name in enumerate(order)}
    machines = {
        left_out: fit([row for name, row in zip(names, rows, strict=True) if part[name] != left_out], machine)
        for left_out in range(min(FOLDS, len(order)))
        if len(order) > 1
    }
    return [machines.get(part[name], machine) for name in names]


def rankings(rows: Sequence[Measured], machines: Sequence[Machine]) -> tuple[Ranking, ...]:
    """Return a ranking for each model with enough rows, by what each row's machine predicts."""
    models: dict[str, list[tuple[float, float]]] = {}
    for row, machine in zip(rows, machines, strict=True):
        models.setdefault(row.model, []).append((rank_s(row, machine), row.step_s))
    return tuple(_ranking(model, pairs) for model, pairs in models.items() if len(pairs) >= _LEAST_IN_A_RANKING)


def errors_by_file(rows: Sequence[Measured], machines: Sequence[Machine]) -> tuple[Errors | None, dict[str, Errors]]:
    """Return the errors of the expected step times over all rows, and over those of each file."""
    files: dict[str, list[float]] = {}
    for row, machine in zip(rows, machines, strict=True):
        files.setdefault(row.file, []).append(predict_s(row, machine) / row.step_s - 1)
    return _overall(files)


def _from_rows(rows: list[Measured], others: list[Measured], machine: Machine) -> CalibrationReport:
    fitted = fit(rows, machine)
    folds = min(FOLDS, len(rows)) if len(rows) > 1 else 0
    held_out, held_out_files = errors_by_file(rows, held_out_machines(rows, machine)) if folds else (None, {})
    tested, tested_files = held_out, held_out_files
    ranked: tuple[Ranking, ...] = ()
    if others:
        tested, tested_files = errors_by_file(others, [fitted] * len(others))
        ranked = rankings(others, [fitted] * len(others))
    elif rankings(rows, [fitted] * len(rows)):
        ranked = rankings(rows, held_out_machines(rows, machine, by_model=True))
    return CalibrationReport(
        calibration=_with_errors(as_calibration(rows, fitted), held_out, folds=folds),
        before=constants_of(machine),
        unfitted=errors_by_file(rows, [machine] * len(rows))[0],
        tested=tested,
        tested_files=tested_files,
        held_out=held_out,
        held_out_files=held_out_files,
        rankings=ranked,
    )


def _from_runs(train: Sequence[Path], test: Sequence[Path], machine: Machine) -> CalibrationReport:
    calibration, error_of = calibrate_runs(train, machine)

    def errors(paths: Sequence[Path], of: Callable[[Path], float]) -> tuple[Errors | None, dict[str, Errors]]:
        return _overall({str(path): [of(path)] for path in paths})

    folds = len(train) if len(train) > 1 else 0
    held_out, held_out_files = errors(train, lambda path: _without(path, train, machine)) if folds else (None, {})
    tested, tested_files = errors(test, error_of) if test else (held_out, held_out_files)
    return CalibrationReport(
        calibration=_with_errors(calibration, held_out, folds=folds),
        before=constants_of(machine),
        unfitted=errors(train, lambda path: read_run(path).error)[0],
        tested=tested,
        tested_files=tested_files,
        held_out=held_out,
        held_out_files=held_out_files,
        rankings=(),
    )


def _without(path: Path, train: Sequence[Path], machine: Machine) -> float:
    _, error_of = calibrate_runs([other for other in train if other != path], machine)
    return error_of(path)


def _with_errors(calibration: Calibration, errors: Errors | None, *, folds: int) -> Calibration:
    if errors is None:
        return calibration
    return dataclasses.replace(
        calibration, folds=folds, mean_abs_error=errors.mean_abs_error, worst_abs_error=errors.worst_abs_error
    )


def _overall(files: dict[str, list[float]]) -> tuple[Errors | None, dict[str, Errors]]:
    everything = [error for errors in files.values() for error in errors]
    return (_errors(everything) if everything else None), {name: _errors(errors) for name, errors in files.items()}


def _errors(relative: list[float]) -> Errors:
    sizes = [abs(error) for error in relative]
    return Errors(len(sizes), sum(sizes) / len(sizes), max(sizes))


def _ranking(model: str, pairs: list[tuple[float, float]]) -> Ranking:
    chosen_s = min(pairs)[1]
    measured = sorted(step_s for _, step_s in pairs)
    return Ranking(model=model, rows=len(pairs), place=measured.index(chosen_s) + 1, behind=chosen_s / measured[0] - 1)

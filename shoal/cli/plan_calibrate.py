"""`shoal plan --calibrate`: fit a machine to measured steps, keep that beside the cluster, and say how good it is."""

import argparse
import json
from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.cli.cluster_flags import cluster_folder, find_cluster
from shoal.core.errors import ConfigError
from shoal.core.units import format_bytes, format_seconds
from shoal.planner.calibration.calibration import save_calibration
from shoal.planner.calibration.report import CalibrationReport, Errors, calibrate_and_test
from shoal.planner.machine import machine_of


def run_calibrate(arguments: argparse.Namespace) -> int:
    """Fit, write calibration.toml, and show the errors."""
    if arguments.file is not None:
        raise ConfigError(f"--calibrate fits to measured steps and needs no job: leave {arguments.file} out.")
    for path in [*arguments.calibrate, *(arguments.test or [])]:
        if not path.exists():
            raise ConfigError(f"there is no {path}.")
    cluster = find_cluster(arguments)
    machine = machine_of(cluster, per_node=arguments.per_node) if cluster else None
    with Console(stderr=True).status("fitting"):
        report = calibrate_and_test(arguments.calibrate, arguments.test, machine=machine)
    path = save_calibration(report.calibration, cluster_folder(arguments)) if report.helps else None
    if arguments.json:
        print(json.dumps(report.as_json() | {"written": str(path) if path else None}, allow_nan=False))
        return 0
    console = Console()
    for block in _blocks(report):
        console.print(block)
    if path is None:
        console.print(
            "The fit predicts steps that it has not seen no better than the figures it started from: it is not kept. "
            "Calibrate from more runs, or from calmer ones.",
            highlight=False,
        )
    else:
        console.print(f"{path} holds the fit; shoal plan uses it for {report.calibration.device}.", highlight=False)
    return 0


def _blocks(report: CalibrationReport) -> Iterator[RenderableType]:
    calibration = report.calibration
    yield Text(f"Fitted to {calibration.rows} measured steps of {calibration.device}.", style="bold")
    errors = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "steps", "mean error", "worst"):
        errors.add_column(name, justify="left" if not name else "right")
    if report.unfitted is not None:
        errors.add_row("before the fit", *_cells(report.unfitted))
    if report.held_out is not None:
        errors.add_row("held out (each by a fit to the others)", *_cells(report.held_out))
    for name, found in report.tested_files.items() if report.tested_files is not report.held_out_files else ():
        errors.add_row(f"tested on {name}", *_cells(found))
    yield errors
    yield _constants(report)
    for ranking in report.rankings:
        verdict = "the fastest" if ranking.place == 1 else f"number {ranking.place} of {ranking.rows} measured"
        yield Text(f"{ranking.model}: the plan ranked first is {verdict}, {ranking.behind:.1%} behind the fastest.")


def _cells(errors: Errors) -> tuple[str, str, str]:
    return f"{errors.rows}", f"{errors.mean_abs_error:.1%}", f"{errors.worst_abs_error:.1%}"


def _constants(report: CalibrationReport) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", "catalog", "fitted"):
        table.add_column(name, justify="left" if not name else "right")
    for name, before in vars(report.before).items():
        table.add_row(name, _value(name, before), _value(name, getattr(report.calibration.constants, name)))
    return table


def _value(name: str, value: float) -> str:
    if name.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith("_s"):
        return format_seconds(value)
    return f"{value:.3g}"

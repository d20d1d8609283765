"""Calibration: what was fitted to measured steps; `calibration.toml` keeps it beside the cluster that it is about."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from shoal.core.toml import read_toml, write_toml
from shoal.planner.machine import Machine
from shoal.planner.time.nearby import Anchor, Nearby

FILE_NAME = "calibration.toml"


@dataclass(frozen=True, kw_only=True)
class Constants:
    """The rates of a device and its links that a fit changes; their names say where they go."""

    matmul_fraction: float
    half_rate_flops: float
    memory_bytes_per_s: float
    operation_s: float
    inside_bytes_per_s: float
    inside_latency_s: float
    between_bytes_per_s: float
    between_latency_s: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """A fit, with what it was fitted on and how well it predicted steps that it had not seen."""

    device: str
    """The title of the device that it is about."""
    fitted_on: tuple[str, ...]
    """The files or run folders."""
    rows: int
    folds: int = 0
    """Into how many parts the rows were cut, each predicted by a fit to the others; 0 where they are too few."""
    mean_abs_error: float | None = None
    """Of those predictions: |predicted / measured - 1|, the mean."""
    worst_abs_error: float | None = None
    constants: Constants
    anchors: tuple[Anchor, ...] = field(default=())

    def fits(self, machine: Machine) -> bool:
        """Return whether it is about the device of `machine`."""
        return self.device == device_name(machine)


def device_name(machine: Machine) -> str:
    """Return what a calibration calls the device of `machine`."""
    return machine.device.title or machine.device.source


def constants_of(machine: Machine) -> Constants:
    """Return the constants as `machine` has them."""
    device, inside, between = machine.device, machine.inside, machine.between
    return Constants(
        matmul_fraction=device.matmul_fraction,
        half_rate_flops=device.half_rate_flops,
        memory_bytes_per_s=device.memory_bytes_per_s,
        operation_s=device.operation_s,
        inside_bytes_per_s=inside.bytes_per_s,
        inside_latency_s=inside.latency_s,
        between_bytes_per_s=between.bytes_per_s,
        between_latency_s=between.latency_s,
    )


def with_constants(machine: Machine, constants: Constants) -> Machine:
    """Return `machine` with other constants; what shards are copied through is slower or faster as its inner link is.

    Not so what gradients are summed in, in place: most of that is part of the backward, and what is left to wait for is
    mostly for a worker that is late.
    """
    copied, rate = machine.copied, constants.inside_bytes_per_s / machine.inside.bytes_per_s
    return replace(
        machine,
        copied=copied and replace(copied, bytes_per_s=rate * copied.bytes_per_s),
        device=replace(
            machine.device,
            matmul_fraction=constants.matmul_fraction,
            half_rate_flops=constants.half_rate_flops,
            memory_bytes_per_s=constants.memory_bytes_per_s,
            operation_s=constants.operation_s,
        ),
        inside=replace(machine.inside, bytes_per_s=constants.inside_bytes_per_s, latency_s=constants.inside_latency_s),
        between=replace(
            machine.between, bytes_per_s=constants.between_bytes_per_s, latency_s=constants.between_latency_s
        ),
    )


def calibrated(machine: Machine, calibration: Calibration) -> Machine:
    """Return `machine` as it was measured to be."""
    nearby = Nearby(calibration.anchors) if calibration.anchors else None
    return replace(with_constants(machine, calibration.constants), nearby=nearby)


def save_calibration(calibration: Calibration, folder: Path) -> Path:
    """Write `calibration` into `folder`, where the cluster's file lies, and return its path."""
    path = folder / FILE_NAME
    write_toml(path, calibration)
    return path


def find_calibration(folder: Path) -> Calibration | None:
    """Return the calibration that lies in `folder`; None where there is none."""
    path = folder / FILE_NAME
    return read_toml(Calibration, path) if path.is_file() else None

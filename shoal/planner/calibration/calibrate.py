"""Fits a machine to measured steps.

1. The constants: eight rates of the device and its links, in logarithms. Minimised is the error of the logarithm of the
   step time (Huber-like: beyond 5% it counts linearly, so an odd row cannot bend the rest), plus a pull towards the
   catalog. The rows of one place (model, tensor, pipeline, micro-batch) have one vote: the shortest and longest step.
2. What remains at each place is smoothed by Gaussian-process regression into the anchors of `nearby`. A place where
   several rows agree is believed more than a single row, and a residual that nobody nearby shares is believed less.

The same for one node or a thousand, for thirty rows or a thousand; with few rows the catalog keeps its say.

Example: 61 rows of Megatron on 64 to 512 A100s. The catalog's constants are 8.8% off in the mean, fitted ones 7.4%,
with anchors 5.2%, each row predicted by a fit that has not seen it (docs/accuracy.md).
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from shoal.planner.calibration.calibration import Calibration, Constants, constants_of, device_name, with_constants
from shoal.planner.calibration.measured import Measured
from shoal.planner.machine import Machine
from shoal.planner.time.nearby import Anchor, Nearby, layer_flops_of, likeness
from shoal.planner.time.steptime import StepTime, as_measured, step_time

_SPREAD = Constants(
    matmul_fraction=0.2,
    half_rate_flops=1.0,
    memory_bytes_per_s=0.2,
    operation_s=1.0,
    inside_bytes_per_s=0.3,
    inside_latency_s=1.0,
    between_bytes_per_s=0.3,
    between_latency_s=1.0,
)
"""How far a constant may well lie from the catalog, as a logarithm: rates are known to a third, latencies are not."""
_WHERE_NONE = Constants(
    matmul_fraction=1.0,
    half_rate_flops=4e9,
    memory_bytes_per_s=1e12,
    operation_s=5e-6,
    inside_bytes_per_s=1e11,
    inside_latency_s=5e-6,
    between_bytes_per_s=1e10,
    between_latency_s=1e-5,
)
"""Where a fit starts for what the catalog leaves at 0, which has no logarithm: about a large GPU's."""
_PULL = 0.1
"""The weight of that against one place: a constant one spread away counts as much as one place 1% off."""
_LINEAR_FROM = 0.05
_AMPLITUDE, _NOISE = 0.1, 0.05
"""How far off the fitted arithmetic usually is at a place, and a single row around that (A100 sets, 2026-11)."""
_ROUNDS = 6
"""Of weighing residuals again: they settle to 1% by then."""
_SURE_FROM = 10
"""Rows of one place beyond which more do not make it surer."""


def fit(rows: Sequence[Measured], machine: Machine) -> Machine:
    """Return `machine` with constants and anchors that predict `rows` best."""
    bare = dataclasses.replace(machine, nearby=None)
    fitted = with_constants(bare, fit_constants(rows, bare))
    return dataclasses.replace(fitted, nearby=Nearby(_anchors(rows, fitted)))


def predict_s(row: Measured, machine: Machine) -> float:
    """Return the step time to expect for a row: Megatron exchanged gradients after the backward."""
    return as_measured(_arithmetic(row, machine), row.profile, row.plan, machine, batch_size=row.batch_size).step_s


def rank_s(row: Measured, machine: Machine) -> float:
    """Return the step time that a row is ranked by: without what was measured nearby."""
    return _arithmetic(row, machine).step_s


def _arithmetic(row: Measured, machine: Machine) -> StepTime:
    return step_time(row.profile, row.plan, machine, batch_size=row.batch_size, overlap=False)


def as_calibration(rows: Sequence[Measured], fitted: Machine) -> Calibration:
    """Return what `fit` found as it is kept; the held-out error is still to be filled in."""
    return Calibration(
        device=device_name(fitted),
        fitted_on=tuple(dict.fromkeys(row.file for row in rows)),
        rows=len(rows),
        constants=constants_of(fitted),
        anchors=fitted.nearby.anchors if fitted.nearby else (),
    )


def fit_constants(rows: Sequence[Measured], machine: Machine) -> Constants:
    """Return the constants that predict `rows` best without anchors."""
    import numpy as np
    from scipy.optimize import least_squares

    known = zip(dataclasses.astuple(constants_of(machine)), dataclasses.astuple(_WHERE_NONE), strict=True)
    start = np.array([math.log(value or other) for value, other in known])
    spread = np.array(dataclasses.astuple(_SPREAD))
    asked = [(row, math.sqrt(1 / min(len(place), 2))) for place in _by_place(rows).values() for row in _extremes(place)]

    def residuals(logarithms: Any) -> list[float]:
        guess = with_constants(machine, _from_logarithms(logarithms))
        errors = [weight * _bent(math.log(rank_s(row, guess) / row.step_s)) for row, weight in asked]
        return errors + list(_PULL * (logarithms - start) / spread)

    found = least_squares(residuals, start, xtol=1e-3, ftol=1e-3)
    return _from_logarithms(found.x)


def _from_logarithms(logarithms: Iterable[float]) -> Constants:
    names = (field.name for field in dataclasses.fields(Constants))
    return Constants(**{name: math.exp(value) for name, value in zip(names, logarithms, strict=True)})


def _bent(error: float) -> float:
    """Return the root of an error that counts squared when it is small and linearly when it is large."""
    size = math.sqrt(2 * (math.sqrt(1 + (error / _LINEAR_FROM) ** 2) - 1))
    return math.copysign(_LINEAR_FROM * size, error)


def _by_place(rows: Sequence[Measured]) -> dict[Anchor, list[Measured]]:
    """Return the rows of each place, which is an anchor without weight yet."""
    places: dict[Anchor, list[Measured]] = defaultdict(list)
    flops = {id(profile): layer_flops_of(profile) for profile in {id(r.profile): r.profile for r in rows}.values()}
    for row in rows:
        mesh, micro_batch = row.plan.mesh, row.plan.batch.micro_batch or 1
        place = Anchor(
            layer_flops=flops[id(row.profile)],
            tensor=mesh.tensor,
            pipeline=mesh.pipeline,
            micro_batch=micro_batch,
            weight=0.0,
        )
        places[place].append(row)
    return dict(places)


def _extremes(rows: list[Measured]) -> list[Measured]:
    """Return the shortest step of `rows` and the longest."""
    ordered = sorted(rows, key=lambda row: row.step_s)
    return ordered if len(ordered) == 1 else [ordered[0], ordered[-1]]


def _anchors(rows: Sequence[Measured], fitted: Machine) -> tuple[Anchor, ...]:
    """Return the anchors for what `fitted` leaves of `rows`."""
    import numpy as np

    places = _by_place(rows)
    residuals = [
        np.median([math.log(row.step_s / rank_s(row, fitted)) for row in together]) for together in places.values()
    ]
    left = np.array(residuals)
    prior = _AMPLITUDE**2 * np.array([[likeness(a.place, b.place) for b in places] for a in places])
    sure = _NOISE**2 / np.array([min(len(together), _SURE_FROM) for together in places.values()])
    noise = sure
    for _ in range(_ROUNDS):
        weights = np.linalg.solve(prior + np.diag(noise), left)
        unexplained = np.abs(noise * weights)
        noise = sure * np.maximum(1, unexplained / np.sqrt(sure))  # an odd one out is believed less
    return tuple(
        dataclasses.replace(place, weight=float(_AMPLITUDE**2 * weight))
        for place, weight in zip(places, weights, strict=True)
    )

"""Whether two runs have trained the same model: one process, and a plan.

1. Step by step: the loss, the norm of the gradient, and that of each parameter's gradient.
2. At the end: every parameter, by the norm of the difference over the norm of the parameter.

Left out of 2 are numbers whose gradient was never more than rounding: an optimizer like Adam makes full steps of what
is noise, and different noise on every mesh. The usual case are the biases of attention's keys, on which no output
depends. A number counts as one if its gradient never reached `_NOISE` of the root mean square of its parameter's, or
`_NOISE_OF_ALL` of that of the whole model's: keys may have a bias that is a parameter of its own.

Of a parameter whose gradient is tiny beside the whole, the norm is compared against `_SMALL` of the whole norm.

Where two runs differ, a third says what rounding alone does: one process again, whose weights begin one rounding beside
those of the first. Numbers that it brings somewhere else altogether are rounding, too, and left out: the bias of a
batch norm before another has a gradient of 0, but for rounding. And if its losses are apart as well, the model enlarges
rounding so far that nothing can be told by comparing; that is then said.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shoal.core.errors import WorkerFailed
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.training.recording import read_recording

TOLERANCE = 1e-4
_NOISE = 1e-4
_NOISE_OF_ALL = 1e-7
"""In the models of benchmarks/families.py biases of keys are at 4e-13 to 2e-9 of it, all else above 1e-6 (2026-11)."""
_SMALL = 1e-3
_ELSEWHERE = 1e-2
"""Of the root mean square of a parameter: by more than this, rounding moves no number that its gradient decides."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two runs part."""

    what: str
    """loss, gradient norm, gradient of NAME, or parameter NAME."""
    step: int
    one: float
    """In one process; for a parameter, its norm."""
    plan: float
    relative: float


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What came of comparing."""

    equal: bool
    steps: int
    tolerance: float
    loss: float
    """The largest relative difference of a loss."""
    gradient_norm: float
    parameter: float
    """The largest relative difference of a parameter at the end."""
    parameter_name: str
    left_out: int
    """Numbers whose gradient was only rounding."""
    numbers: int
    first: Difference | None
    """The first that is beyond the tolerance."""
    rounding: float | None
    """The largest relative difference of a loss or gradient norm that rounding alone makes; None: nobody asked."""
    one_run: str
    plan_run: str

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def compare_runs(
    one: RunFolder, plan: RunFolder, *, nudged: RunFolder | None = None, tolerance: float = TOLERANCE
) -> Verdict:
    """Return whether the run `plan` has trained what the run `one`, of one process, has trained.

    `nudged` is a run of one process whose weights began one rounding beside those of `one`.
    """
    steps = _compared_steps(one, plan)
    found = [difference for pair in steps for difference in _step_differences(*pair)]
    last = steps[-1][0]["step"]
    at_end, left_out, numbers = _parameter_differences(one, plan, nudged, last)
    worst = max(at_end, key=lambda difference: difference.relative)
    beyond = [each for each in [*found, *at_end] if not each.relative <= tolerance]
    return Verdict(
        equal=not beyond,
        steps=len(steps),
        tolerance=tolerance,
        loss=max(each.relative for each in found if each.what == "loss"),
        gradient_norm=max(each.relative for each in found if each.what == "gradient norm"),
        parameter=worst.relative,
        parameter_name=worst.what.removeprefix("parameter "),
        left_out=left_out,
        numbers=numbers,
        first=beyond[0] if beyond else None,
        rounding=_rounding(one, nudged) if nudged else None,
        one_run=str(one.path),
        plan_run=str(plan.path),
    )


def _compared_steps(one: RunFolder, other: RunFolder) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    return list(zip(_steps(one), _steps(other), strict=True))


def _rounding(one: RunFolder, nudged: RunFolder) -> float:
    """Return by how much losses and gradient norms differ between two runs of one process."""
    found = [each for pair in _compared_steps(one, nudged) for each in _step_differences(*pair)]
    return max(each.relative for each in found if each.what in ("loss", "gradient norm"))


def _steps(folder: RunFolder) -> list[dict[str, Any]]:
    events = [event for event in EventReader(folder.events_of(0)).poll() if event["kind"] == "step"]
    if not events:
        raise WorkerFailed(f"{folder.path} has no step to compare.")
    return events


def _step_differences(one: dict[str, Any], plan: dict[str, Any]) -> Iterator[Difference]:
    step, whole = one["step"], one["gradient_norm"] or 0.0
    yield _difference("loss", step, one["loss"], plan["loss"])
    yield _difference("gradient norm", step, one["gradient_norm"], plan["gradient_norm"])
    for name, norm in one["parameter_norms"].items():
        theirs = plan["parameter_norms"].get(name)
        yield _difference(f"gradient of {name}", step, norm, theirs, at_least=_SMALL * whole)


def _difference(what: str, step: int, one: float | None, plan: float | None, at_least: float = 0.0) -> Difference:
    mine, theirs = math.nan if one is None else one, math.nan if plan is None else plan
    size = max(abs(mine), at_least)
    relative = abs(theirs - mine) / size if size else float(theirs != mine)
    return Difference(what=what, step=step, one=mine, plan=theirs, relative=relative)


def _parameter_differences(
    one: RunFolder, plan: RunFolder, nudged: RunFolder | None, step: int
) -> tuple[list[Difference], int, int]:
    mine, largest = read_recording(one.parameters)
    theirs, _ = read_recording(plan.parameters)
    moved, _ = read_recording(nudged.parameters) if nudged else (mine, None)
    missing = sorted(mine.keys() ^ theirs.keys())
    if missing:
        raise WorkerFailed(f"the two runs hold different parameters: {', '.join(missing[:5])} is in one of them only.")
    found, left_out, numbers = [], 0, 0
    least = _NOISE_OF_ALL * _root_mean_square(largest.values())
    for name, tensor in mine.items():
        counts = _is_determined(largest.get(name), tensor, least) & _stays(tensor, moved[name])
        left_out += int(counts.numel() - counts.sum())
        numbers += tensor.numel()
        size, other = float(tensor[counts].norm()), float(theirs[name][counts].norm())
        apart = float((theirs[name] - tensor)[counts].norm())
        relative = apart / size if size else float(apart > 0)
        found.append(Difference(what=f"parameter {name}", step=step, one=size, plan=other, relative=relative))
    return found, left_out, numbers


def _is_determined(largest: torch.Tensor | None, like: torch.Tensor, least: float) -> torch.Tensor:
    """Return which numbers of a parameter have had a gradient of more than rounding, which is at least `least`."""
    if largest is None:
        return torch.ones_like(like, dtype=torch.bool)
    noise = max(_NOISE * _root_mean_square([largest]), least)
    return (largest == 0) | (largest >= noise)  # 0 is 0 on every mesh


def _stays(tensor: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
    """Return which numbers of a parameter are where they were, after a training that began one rounding beside it."""
    stays = (moved - tensor).abs() <= _ELSEWHERE * _root_mean_square([tensor])
    # Where most have moved they all are rounding, also those that have come near their place by chance.
    return stays if 2 * int(stays.sum()) >= stays.numel() else torch.zeros_like(stays)


def _root_mean_square(tensors: Iterable[torch.Tensor]) -> float:
    squares = [(float(tensor.double().square().sum()), tensor.numel()) for tensor in tensors]
    return math.sqrt(sum(square for square, _ in squares) / max(1, sum(count for _, count in squares)))

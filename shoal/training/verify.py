"""Whether two runs have trained the same model: one process, and a plan.

1. Step by step: the loss, the norm of the gradient, and that of each parameter's gradient.
2. At the end: every parameter, by the norm of the difference over the norm of the parameter.

Left out of 2 are numbers whose gradient was never more than rounding: an optimizer like Adam makes full steps of what
is noise, and different noise on every mesh. The usual case are the biases of attention's keys, on which no output
depends. A number counts as one if its gradient never reached `_NOISE` of the root mean square of its parameter's.

Of a parameter whose gradient is tiny beside the whole, the norm is compared against `_SMALL` of the whole norm.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from shoal.core.errors import WorkerFailed
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.training.recording import read_recording

TOLERANCE = 1e-4
_NOISE = 1e-4
_SMALL = 1e-3


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
    one_run: str
    plan_run: str

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return asdict(self)


def compare_runs(one: RunFolder, plan: RunFolder, *, tolerance: float = TOLERANCE) -> Verdict:
    """Return whether the run `plan` has trained what the run `one`, of one process, has trained."""
    steps = list(zip(_steps(one), _steps(plan), strict=True))
    found = [difference for mine, theirs in steps for difference in _step_differences(mine, theirs)]
    last = steps[-1][0]["step"] if steps else 0
    at_end, left_out, numbers = _parameter_differences(one, plan, last)
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
        one_run=str(one.path),
        plan_run=str(plan.path),
    )


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


def _parameter_differences(one: RunFolder, plan: RunFolder, step: int) -> tuple[list[Difference], int, int]:
    mine, largest = read_recording(one.parameters)
    theirs, _ = read_recording(plan.parameters)
    missing = sorted(mine.keys() ^ theirs.keys())
    if missing:
        raise WorkerFailed(f"the two runs hold different parameters: {', '.join(missing[:5])} is in one of them only.")
    found, left_out, numbers = [], 0, 0
    for name, tensor in mine.items():
        counts = _is_determined(largest.get(name), tensor)
        left_out += int(counts.numel() - counts.sum())
        numbers += tensor.numel()
        size, other = float(tensor[counts].norm()), float(theirs[name][counts].norm())
        apart = float((theirs[name] - tensor)[counts].norm())
        relative = apart / size if size else float(apart > 0)
        found.append(Difference(what=f"parameter {name}", step=step, one=size, plan=other, relative=relative))
    return found, left_out, numbers


def _is_determined(largest: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """Return which numbers of a parameter have had a gradient of more than rounding."""
    if largest is None:
        return torch.ones_like(like, dtype=torch.bool)
    return (largest == 0) | (largest >= _NOISE * largest.square().mean().sqrt())  # 0 is 0 on every mesh

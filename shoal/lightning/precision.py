"""Precision and clipping, as Lightning calls them, by the plan."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from shoal.core.errors import PlanError
from shoal.lightning.laying import Laid
from shoal.lightning.names import Precision
from shoal.spec.plan import Plan

_PLANNED = {"32-true": "fp32", "bf16-mixed": "bf16"}
"""What Lightning calls the precisions of plans."""


class PlanPrecision(Precision):
    """Forward passes in the plan's precision, and gradients clipped by the norm of the whole model."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        self.planned = precision
        """What the plan calls it."""
        self.precision: Any = next(name for name, planned in _PLANNED.items() if planned == precision)
        self.laid: Laid | None = None

    @contextmanager
    def forward_context(self) -> Iterator[None]:
        """Be entered around every step of the module."""
        assert self.laid is not None
        with self.laid.precision():
            yield

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:  # noqa: ARG002  there is one
        """Clip by the norm over all workers' slices."""
        assert self.laid is not None
        self.laid.clip(float(clip_val))


def planned_precision(asked: str, plan: Plan | None) -> str:
    """Return the precision that Trainer(precision=`asked`) and the `plan` say together."""
    if asked not in _PLANNED:
        raise PlanError(
            f"Trainer(precision={asked!r}) is none that a plan has. Use '32-true' (fp32) or 'bf16-mixed' (bf16)."
        )
    wanted = _PLANNED[asked]
    if plan is None or wanted == plan.precision:
        return wanted
    if wanted == "fp32":  # also what a Trainer has that was told nothing
        return plan.precision
    raise PlanError(
        f"Trainer(precision={asked!r}), and the plan has precision={plan.precision!r}. Write precision={wanted!r} into "
        "the plan, or leave it out of the Trainer."
    )

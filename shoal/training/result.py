"""What a step was: known to the processor at once, or when a GPU is done with it and somebody asks."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from shoal.core.errors import NonFiniteLoss, PeerLost
from shoal.data.steps import Part
from shoal.sync.mode import Met
from shoal.training.clock import Seconds
from shoal.training.pieces import Piece


@dataclass(frozen=True)
class StepResult:
    """What a step was."""

    loss: float
    """The mean over the global batch, the same on every worker."""
    part_loss: float | None
    """The mean over this worker's part; None if that weighs nothing, or another stage of the pipeline knows it."""
    weight: float
    batch_weight: float
    gradient_norm: float | None = None
    """Of the whole model, before clipping; None where nobody asked for it."""
    parameter_norms: dict[str, float] = field(default_factory=dict)
    """The norm of each parameter's gradient, where asked for."""
    met: Met | None = None
    """How this worker has met the others, where that is not all-reduce."""


class Stepped(Protocol):
    """A step that is done, or under way."""

    @property
    def part(self) -> Part:
        """What it was done on."""

    @property
    def pieces(self) -> Sequence[Piece]:
        """The same, as it was computed."""

    @property
    def result(self) -> StepResult:
        """What the step was: known when it is done, so asking waits."""

    @property
    def seconds(self) -> Seconds:
        """Where its time went."""

    def losses(self) -> list[float]:
        """Return the scaled loss of each piece, where this worker knows it."""


class Pending:
    """A step that is under way on the device; what it was is on its way to the processor."""

    def __init__(
        self,
        part: Part,
        pieces: Sequence[Piece],
        losses: torch.Tensor | None,
        totals: torch.Tensor,
        *,
        weight: float,
        batch_weight: float,
        has_norm: bool,
        names: tuple[str, ...],
    ) -> None:
        self.part, self.pieces = part, pieces
        self.seconds: Seconds = dict
        self._weight, self._batch_weight = weight, batch_weight
        self._has_norm, self._names = has_norm, names
        self._num_losses = 0 if losses is None else len(losses)
        together = totals if losses is None else torch.cat([losses.to(totals), totals])
        # Copied now: asked for later, it would wait behind the next step, which has been started by then.
        self._numbers = together.detach().to("cpu", non_blocking=True)
        self._copied = _event_on(together.device)

    def losses(self) -> list[float]:
        """Wait until the step is done, and return the scaled loss of each piece, where this worker knows it."""
        return self._read()[: self._num_losses]

    @functools.cached_property
    def result(self) -> StepResult:
        """What the step was: known when it is done, so asking waits."""
        losses, (loss, *squares) = self.losses(), self._read()[self._num_losses :]
        return StepResult(
            loss=loss,
            part_loss=sum(losses) * self._batch_weight / self._weight if losses and self._weight else None,
            weight=self._weight,
            batch_weight=self._batch_weight,
            gradient_norm=math.sqrt(squares[0]) if self._has_norm else None,
            parameter_norms={name: math.sqrt(value) for name, value in zip(self._names, squares[1:], strict=False)},
        )

    def _read(self) -> list[float]:
        if self._copied is not None:
            self._copied.synchronize()
        return self._numbers.tolist()


def _event_on(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event


def check_finite(pending: Stepped, loss: float, *, worker: int, applied: bool) -> None:
    """Raise NonFiniteLoss on the worker whose samples are to blame, PeerLost on the others, if `loss` is not finite."""
    if math.isfinite(loss):
        return
    step = pending.part.step
    losses = zip(pending.pieces, pending.losses(), strict=False)
    bad = [piece for piece, value in losses if not math.isfinite(value)]
    if not bad:
        raise PeerLost(f"step {step}: the loss of another worker is not finite.")
    samples = [sample for piece in bad for sample in piece.samples]
    raise NonFiniteLoss(
        f"the loss of step {step} is not finite (NaN or infinite) on worker {worker}, samples "
        f"{', '.join(map(str, samples[:64]))}{' ...' if len(samples) > 64 else ''}. "
        f"The step was {'applied' if applied else 'not applied'}."
    )

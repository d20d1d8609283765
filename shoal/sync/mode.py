"""What every way for gradients to meet, other than all-reduce, has in common: one call a step.

1. A worker computes the mean gradient over its part of the global batch, for itself: it is in the parameters' `.grad`.
2. `Mode.meet` is given what that weighs. Afterwards the parameters are those that the next forward runs with, and `Met`
   says what took part, and which step this worker does next.
3. After a boundary (a step with an evaluation or a checkpoint after it, and the last one) all workers hold the same
   parameters: whoever gets there waits for all others. Between boundaries they may be apart.

Example: 3 of 4 workers are there when the deadline of step 7 has passed, each with a mean over 8 samples. Their sum is
weighted by 8/24, and all three go on with step 8. The fourth comes during step 10: its gradient is added there with
8/32, it gets the parameters after step 10 from another, and its next step is 11.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed import Store

from shoal.comm.alive import Watch
from shoal.comm.collectives import Waiting
from shoal.comm.rank import Rank
from shoal.core.events import EventLog
from shoal.spec.sync import Sync


@dataclass(frozen=True)
class Mine:
    """What this worker brings to a step."""

    step: int
    """For which step its samples were meant, from 1."""
    weight: float
    """What its part weighs; 0 for a stand-in, whose gradient counts nothing."""
    loss: float
    """The mean over its part."""
    samples: int
    part: int = 0
    """Which part of the global batch they are: its own, or one that it has from `Tickets`."""
    batch_weight: float = 0.0
    """What the whole global batch weighs, where this worker knows that without asking others; 0: it does not."""


@dataclass(frozen=True)
class Met:
    """What came of a step, as this worker knows it."""

    loss: float
    """The mean over all that took part."""
    weight: float
    """What they weigh together."""
    took_part: tuple[int, ...]
    """The workers whose samples are in the step, by their numbers."""
    next_step: int
    """What this worker does next: the step after, or a later one where it was late."""
    staleness: int = 0
    """How many steps the parameters had gone on since this worker's gradient was computed with them."""
    is_common: bool = False
    """Whether parameters, buffers, optimizer and schedule, as they are here now, are the run's after step
    `next_step - 1`: whoever is left goes on from there when a worker is lost. True at every boundary; the more often
    else, the less is done again."""


@dataclass(frozen=True)
class Trained:
    """What is trained, on this worker."""

    parameters: dict[str, torch.nn.Parameter]
    """Those that are trained, by their names in the job's model."""
    buffers: dict[str, torch.Tensor]
    optimizer: torch.optim.Optimizer
    schedule: Any
    """A learning-rate scheduler, or None."""
    clip_norm: float | None = None


@dataclass(frozen=True)
class Place:
    """Where a mode runs: what it reaches the others by."""

    sync: Sync
    rank: Rank
    store: Store
    """For this mode alone; the group of all workers is there as well."""
    device: torch.device
    log: EventLog
    is_boundary: Callable[[int], bool]
    """Whether all workers hold the same parameters after a step."""
    first_step: int = 1
    """Which step is done next."""
    last_step: int = 0
    """Which is the job's last: no tickets are given out beyond it; 0: there is no end."""
    seed: int = 0
    timeout_s: float = 600.0
    watch: Watch | None = None
    waiting: Waiting = nullcontext
    """Entered, as `with place.waiting():`, while this worker waits for others: it is then counted as communication."""
    changing: Callable[[], None] = lambda: None
    """Called right before parameters or the optimizer's state are written otherwise than by the optimizer's step, as
    when a late worker gets those of another: what is here is then no state to go on from."""
    reached: Callable[[int], None] = lambda _: None
    """Called as soon as all is there that `Met.is_common` speaks of, after this step, if `meet` still waits for others
    then: if it is ended by a loss, the step is not lost."""


class Mode(Protocol):
    """One way for gradients to meet. Opened by every worker, with equal parameters on all of them.

    One whose workers take parts of steps as they are free has an attribute `tickets` as well.
    """

    def meet(self, mine: Mine) -> Met:
        """Do the step with this worker's gradient, and leave the parameters as they are after it.

        Optimizer (after clipping) and schedule have made their step then, and gradients are gone (None).
        """

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what it keeps at a boundary, live, by name, the same on all workers: part of the training state.

        They are there once the mode is open: those of a run that is gone on with are copied into them before a step.
        """

    def close(self) -> None:
        """End what runs for it. Called by every worker, also after an error."""


@runtime_checkable
class Overlapping(Protocol):
    """A mode whose messages travel beside computing, if it is told what is computed."""

    def sending(self) -> AbstractContextManager[None]:
        """Return what the last backward of a step runs in: gradients then go out as they become ready."""

    def fetch_beside(self, model: torch.nn.Module) -> None:
        """Let parameters come beside the forward of `model` from now on: `meet` returns before they are there."""

    def finish_fetching(self) -> None:
        """Have all parameters in place: for whoever looks at them between two steps."""


class Tickets(Protocol):
    """Gives out the parts of steps, in their order, to whoever is free: each to one worker, and none twice.

    A worker takes one part ahead, and loads it while it computes another. `meet` of a part then never waits at a
    boundary, of which this worker may hold another part: `settle` does, once its next part lies behind the boundary.
    """

    def next_part(self) -> tuple[int, int] | None:
        """Return the step, from 1, and the number of the part that this worker takes; None if all are given out."""

    def settle(self, step: int) -> Met:
        """Wait until all parts up to `step`, a boundary, are applied, and hold what all hold after it.

        Called by every worker once for each boundary, in their order; `next_step` is the one after.
        """

"""What a run does when it loses a worker."""

from dataclasses import dataclass

from shoal.core.errors import PlanError

SNAPSHOTS = ("auto", "never")


@dataclass(frozen=True, kw_only=True)
class OnLoss:
    """What happens when a worker dies. It counts where shoal has started the workers."""

    go_on: bool = True
    """Whether the others go on, and another is started in its place; otherwise the run ends."""
    restarts: int = 3
    """How often each worker is started anew, at most. The others go on without one that is not."""
    wait_s: float = 120.0
    """How long the others wait for a replacement, where without it they do not hold the whole model."""
    replan: bool = False
    """Whether they go on with a shorter tensor or pipeline axis where no replacement comes: each then holds more of the
    model, and must have the memory for it. Otherwise the run ends."""
    snapshot: str = "auto"
    """How often what only one worker holds is copied: after so many steps; auto: so that it costs next to nothing;
    never: what a lost worker alone held is read from the last checkpoint."""

    def __post_init__(self) -> None:
        if self.restarts < 0 or not self.wait_s >= 0:
            raise PlanError(f"on_loss.restarts={self.restarts}, on_loss.wait_s={self.wait_s:g}: both are at least 0.")
        if self.snapshot not in SNAPSHOTS and not (self.snapshot.isdecimal() and int(self.snapshot) > 0):
            raise PlanError(f"on_loss.snapshot={self.snapshot!r}: write auto, never, or a number of steps, as '5'.")

    @property
    def snapshot_steps(self) -> str | int:
        """`snapshot`, as a number where it is one."""
        return self.snapshot if self.snapshot in SNAPSHOTS else int(self.snapshot)

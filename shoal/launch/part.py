"""A host's part of the workers of a run."""

import contextlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """Those of a run's workers that are on this host, and the store in which all of them meet."""

    store: Any
    host: str
    port: int
    """Where the store can be reached."""
    workers: int
    """Of the run, on all hosts."""
    ranks: range
    """Those of this host."""

    @property
    def is_all(self) -> bool:
        """Whether there is no other host."""
        return len(self.ranks) == self.workers

    def tell_over(self) -> None:
        """Tell the launchers of other hosts that the run has failed."""
        if not self.is_all:
            from shoal.comm.members import OVER, members_of  # imports torch

            with contextlib.suppress(RuntimeError):  # whoever hosts the store is gone: they find out for themselves
                members_of(self.store).set(OVER, "1")

    def tell_ended(self) -> None:
        """Tell whoever started the launchers of all hosts that the workers of this one have ended."""
        if not self.is_all:
            from shoal.comm.members import ENDED, members_of

            with contextlib.suppress(RuntimeError):
                members_of(self.store).add(ENDED, 1)

    def is_over(self) -> bool:
        """Return whether the launcher of another host has said that the run has failed."""
        from shoal.comm.members import OVER, members_of

        return not self.is_all and bool(members_of(self.store).check([OVER]))

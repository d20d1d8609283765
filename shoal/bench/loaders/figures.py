"""What was measured, and how the loaders compare."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from shoal.bench.loaders.peers.task import Task

OURS = "shoal"
LIMIT = "gather in C alone"
"""Not a loader: shown, and never called the fastest."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What one loader did."""

    name: str
    version: str
    workers: int | None
    """Worker processes, where it has a choice."""
    how: str
    samples_per_s: float
    """The median over turns."""
    slowest: float
    fastest: float
    first_batch_s: float
    """From opening the data to the first batch; imports are done."""
    memory_bytes: int
    """The most that it held with its children, without pages of files; 0 where nobody can tell."""
    num_samples: int
    """How many samples it was given: fewer than others where its writer ran out of time."""
    write_s: float
    """What writing its own format took; 0 where it reads the plain files."""
    disk_bytes: int


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Loaders that were measured in turns, on the same samples."""

    task: Task
    num_samples: int
    sample_bytes: int
    rounds: int
    turn_s: float
    loaded: Sequence[Loaded]
    left_out: Sequence[str]
    """A sentence each."""

    @property
    def ours(self) -> Loaded | None:
        """shoal's figures."""
        return next((loaded for loaded in self.loaded if loaded.name == OURS), None)

    def peers(self) -> list[Loaded]:
        """Return the other loaders."""
        return [loaded for loaded in self.loaded if loaded.name not in (OURS, LIMIT)]

    def times(self, loaded: Loaded) -> float | None:
        """Return how many times as fast shoal is."""
        return None if self.ours is None else self.ours.samples_per_s / loaded.samples_per_s

    def best_peer(self) -> Loaded | None:
        """Return the fastest of the others."""
        return max(self.peers(), key=lambda loaded: loaded.samples_per_s, default=None)

    def as_json(self) -> dict[str, Any]:
        """Return all figures."""
        rows = [{**asdict(loaded), "shoal_is_times_as_fast": self.times(loaded)} for loaded in self.loaded]
        return {
            "task": asdict(self.task),
            "num_samples": self.num_samples,
            "sample_bytes": self.sample_bytes,
            "rounds": self.rounds,
            "turn_s": self.turn_s,
            "loaders": rows,
            "left_out": list(self.left_out),
        }

"""Plan: how to train, and what that is predicted to cost."""

import math
from dataclasses import dataclass, field

from shoal.core.errors import PlanError, did_you_mean

PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """How many workers stand along each axis."""

    replicate: int = 1
    """Copies of the model, each on its own part of every global batch."""

    def __post_init__(self) -> None:
        if self.replicate < 1:
            raise PlanError(f"mesh.replicate={self.replicate}: a mesh has at least 1 worker.")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How a global batch is cut up."""

    micro_batch: int | None = None
    """The most samples in one forward; a larger part is accumulated. None: the whole part at once."""
    shares: tuple[float, ...] = ()
    """The fraction of each global batch that each replica takes. Empty: equal shares."""

    def __post_init__(self) -> None:
        if self.micro_batch is not None and self.micro_batch < 1:
            raise PlanError(f"micro_batch={self.micro_batch}: a micro-batch has at least 1 sample.")
        if any(not share > 0 for share in self.shares):
            raise PlanError(f"shares {_listed(self.shares)}: each share must be more than 0.")
        if self.shares and abs(math.fsum(self.shares) - 1) > 1e-6:
            raise PlanError(f"shares {_listed(self.shares)} sum to {math.fsum(self.shares):.6g}. They must sum to 1.")


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What a plan is predicted to cost; the run measures the same under the same names."""

    step_s: float
    """Seconds of one step, without data loading."""
    comm_s: float
    """Seconds of a step in which the slowest worker waits for communication."""
    samples_per_s: float
    peak_bytes: tuple[int, ...]
    """The most memory each worker holds for the model, its training state and its activations."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train. A plan that exists is consistent in itself; `training.prepare` holds it against the job."""

    mesh: Mesh = field(default_factory=Mesh)
    batch: Batch = field(default_factory=Batch)
    precision: str = "fp32"
    """fp32, or bf16: parameters in float32, matrix products in bfloat16 (autocast)."""
    timeout_s: float = 600.0
    """How long a worker waits for the others in one collective before it gives up."""
    predicted: Predicted | None = None

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise PlanError(f"precision={self.precision!r} is none.{did_you_mean(self.precision, list(PRECISIONS))}")
        if not self.timeout_s > 0:
            raise PlanError(f"timeout_s={self.timeout_s:g}: a timeout must be more than 0.")
        shares = self.batch.shares
        if shares and len(shares) != self.workers:
            raise PlanError(f"{len(shares)} shares for {self.workers} workers. Give one share to each worker.")

    @property
    def workers(self) -> int:
        """How many processes the plan runs."""
        return self.mesh.replicate

    @property
    def shares(self) -> tuple[float, ...]:
        """Each replica's fraction of a global batch, equal unless the plan says otherwise."""
        return self.batch.shares or (1 / self.mesh.replicate,) * self.mesh.replicate


def _listed(shares: tuple[float, ...]) -> str:
    return ",".join(f"{share:g}" for share in shares)

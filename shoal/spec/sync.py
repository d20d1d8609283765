"""Sync: how the gradients of replicas meet."""

from dataclasses import dataclass

from shoal.core.errors import PlanError, did_you_mean

MODES = ("all-reduce", "deadline", "local", "server")
CODECS = ("none", "auto", "bf16", "int8", "int4", "sign", "topk", "threshold", "powersgd")
WHOLE_CODECS = ("powersgd",)
"""Those that need whole gradients, and so do not go with ZeRO."""
WAYS = (
    "auto",
    "engine",
    "shared-memory",
    "naive",
    "tree",
    "ring",
    "halving-doubling",
    "recursive-doubling",
    "two-level",
)
OUTER = ("average", "nesterov")
LATE = ("add", "drop")
PLACES = ("threads", "processes")


@dataclass(frozen=True, kw_only=True)
class Sync:
    """How the gradients of the replicas meet."""

    mode: str = "all-reduce"
    """all-reduce: all wait for all, at every step; deadline: at every step, those who are there in time; local: after
    some local steps; server: at K servers, which hold the parameters."""
    codec: str = "none"
    """What is exchanged is squeezed through it on its way; auto: of those that go with the plan, the one that pays on
    the link that is there, or none."""
    way: str = "auto"
    """How they are summed: by the engine's collective, in shared memory (one host), or by an algorithm of ours; auto:
    the fastest for the links that are there."""
    bucket_bytes: int = 0
    """How much travels at once; 0: by the link's latency and rate (1 to 64 MiB), 4 MiB in shared memory. With ZeRO, a
    layer at a time, whatever this says."""
    deadline_s: float = 0.0
    """deadline: how long a step waits for the others after the first has its gradient; 0: by the steps before, so that
    only those who are much slower than the others are late."""
    quorum: int = 0
    """deadline: a step goes on as soon as so many are there (with n + b workers: n); 0: all, or the deadline."""
    late: str = "add"
    """deadline: what becomes of a gradient that comes too late: added to the next step, or dropped."""
    local_steps: int = 1
    """local: how many steps each worker does for itself between two meetings."""
    outer: str = "average"
    """local: what a meeting makes of what the workers have found: their average, or DiLoCo's nesterov."""
    outer_lr: float = 0.7
    """local, nesterov: how far it goes at each meeting."""
    outer_momentum: float = 0.9
    """local, nesterov: how much of the direction of the meetings before it keeps."""
    servers: int = 1
    """server: how many servers there are; each owns an equal slice of the parameters."""
    place: str = "threads"
    """server: whether they run as threads beside workers, or as processes of their own."""
    asynchronous: bool = False
    """server: whether each gradient is applied as it comes, instead of the sum of all of a step."""
    max_staleness: int = 4
    """server, asynchronous: how many steps a worker may be ahead of the slowest."""

    def __post_init__(self) -> None:
        known = {"mode": MODES, "codec": CODECS, "way": WAYS, "outer": OUTER, "late": LATE, "place": PLACES}
        for name, words in known.items():
            if (value := getattr(self, name)) not in words:
                raise PlanError(f"sync.{name}={value!r} is none.{did_you_mean(value, list(words))}")
        if self.bucket_bytes < 0:
            raise PlanError(f"sync.bucket_bytes={self.bucket_bytes}: a bucket has more than 0 bytes (0: by the link).")
        if self.servers < 1 or self.local_steps < 1:
            raise PlanError(f"sync.servers={self.servers}, sync.local_steps={self.local_steps}: both are at least 1.")
        if self.local_steps > 1 and self.mode != "local":
            raise PlanError(f"sync.local_steps={self.local_steps} goes with sync.mode='local', not {self.mode!r}.")
        if not self.deadline_s >= 0 or self.quorum < 0 or self.max_staleness < 0:
            raise PlanError(
                f"sync.deadline_s={self.deadline_s:g}, sync.quorum={self.quorum}, sync.max_staleness="
                f"{self.max_staleness}: none of them is below 0."
            )
        for name, mode in (("quorum", "deadline"), ("deadline_s", "deadline"), ("asynchronous", "server")):
            if getattr(self, name) and self.mode != mode:
                value = getattr(self, name)
                raise PlanError(f"sync.{name}={value} goes with sync.mode={mode!r}, not {self.mode!r}.")
        if not self.outer_lr > 0 or not 0 <= self.outer_momentum < 1:
            raise PlanError(
                f"sync.outer_lr={self.outer_lr:g}, sync.outer_momentum={self.outer_momentum:g}: the first is above 0, "
                "the second from 0 up to less than 1."
            )

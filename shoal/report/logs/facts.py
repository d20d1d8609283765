"""What the rarer events of a log say: communication, loading, saving, memory, traces, faults."""

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Call:
    """All calls of one collective with one size: how many there were, and how long they took in all."""

    op: str
    algorithm: str
    link: str
    """shm (memory of the host), host (sockets within it), network or gpu."""
    bytes: int
    """Of one call."""
    count: int
    seconds: float
    """Of all of them, beside computing or not."""


@dataclass(frozen=True)
class Loading:
    """What a worker's loader did over `steps` steps."""

    rank: int
    steps: int
    samples: float
    bytes: float
    wait_s: float
    """How long training waited for it."""
    fill_s: float
    """How long its threads were busy, added up over them."""
    threads: int
    depth: int
    """How many batches they are ahead."""
    storage: str
    """What is read: memory, or the kind of file system."""
    fill_cpu_s: float = 0.0
    """How much of `fill_s` they were computing, and not waiting for storage; 0 where nobody looked."""

    @property
    def batch_s(self) -> float:
        """How long one thread takes for a batch."""
        return self.fill_s / self.steps if self.steps else 0.0

    @property
    def batch_cpu_s(self) -> float:
        """How long it computes for it."""
        return self.fill_cpu_s / self.steps if self.steps else 0.0


@dataclass(frozen=True)
class LoadingOver:
    """The loading of the steps up to `step`."""

    step: int
    loading: Loading


@dataclass(frozen=True)
class Saved:
    """One checkpoint."""

    step: int
    stall_s: float
    """What training waited for it."""
    write_s: float
    bytes: float
    error: str = ""
    """Why it could not be written; empty where it was."""


@dataclass(frozen=True)
class Fault:
    """What went wrong, or was mended: a worker lost, ended or come, a hang, a checkpoint not written, a new start."""

    time_s: float
    step: int | None
    kind: str
    sentence: str
    recovery_s: float | None = None
    """From the fault to the next step that was done."""
    parts_s: tuple[tuple[str, float], ...] = ()
    """What the recovery was made of, by name."""
    lost_steps: int | None = None
    workers: tuple[int, ...] = ()
    """Who was lost, or came."""


@dataclass(frozen=True)
class MemoryOver:
    """What a worker held at moments of one step."""

    rank: int
    step: int
    at_s: tuple[float, ...]
    """Since the step began."""
    bytes: tuple[float, ...]
    labels: tuple[str, ...]


@dataclass(frozen=True)
class TraceFile:
    """A trace of one worker's step, in the run folder."""

    rank: int
    step: int
    file: str
    why: str


@dataclass(frozen=True)
class Shares:
    """Each replica's part of a global batch from `step` on."""

    step: int
    shares: tuple[float, ...]
    predicted_gain: float | None


def merge_calls(calls: Iterable[Call]) -> list[Call]:
    """Return one for each op, algorithm, link and size."""
    found: dict[tuple[str, str, str, int], Call] = {}
    for call in calls:
        key = (call.op, call.algorithm, call.link, call.bytes)
        so_far = found.get(key)
        found[key] = (
            replace(call, count=so_far.count + call.count, seconds=so_far.seconds + call.seconds) if so_far else call
        )
    return list(found.values())

"""A steady step of a run, as far as advice needs it: taken from the summary, and from nothing else."""

import math
from dataclasses import dataclass

from shoal.core.events import PASSES
from shoal.report.logs.facts import Loading, Saved
from shoal.report.logs.steady import Worker
from shoal.report.summary import Summary
from shoal.spec.cluster import Cluster
from shoal.spec.communication import Communication
from shoal.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Busy:
    """One worker's mean steady step."""

    rank: int
    samples: float
    total_s: float
    split: dict[str, float]
    """Seconds of each of `PARTS`."""
    passes_s: float
    """Forward and backward: what grows with the samples."""
    median_passes_s: float | None = None
    """The same of the median step."""
    peak_bytes: int | None = None

    @property
    def typical_s(self) -> float:
        """Forward and backward of a step in which the machine did nothing else."""
        return self.passes_s if self.median_passes_s is None else min(self.passes_s, self.median_passes_s)

    @property
    def busy_s(self) -> float:
        """Seconds in which it waits for nobody."""
        return self.total_s - self.idle_s

    @property
    def idle_s(self) -> float:
        """Seconds in which it waits for other workers, or for what comes from them."""
        return self.split["communication"] + self.split["waiting"] + self.split["bubble"]

    def share(self, part: str) -> float:
        """Return the fraction of a step that goes into `part`."""
        return self.split[part] / self.total_s


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What advice goes by."""

    plan: Plan
    batch_size: int
    steps: int
    """How many there were, warm-up included."""
    workers: tuple[Busy, ...]
    loading: dict[int, Loading]
    """What the loader of each worker did, by rank."""
    saves: tuple[Saved, ...] = ()
    """The checkpoints that were written, of the worker that waited longest for them."""
    communication: Communication | None = None
    gradient_bytes: int = 0
    """Of a whole model: as many as its parameters have."""
    cores: float = 1.0
    """Of a node, for each of its workers."""
    memory_bytes: float = math.inf
    """What each worker can have."""

    @property
    def critical(self) -> Busy:
        """The worker that the others wait for."""
        return max(self.workers, key=lambda worker: worker.busy_s)

    @property
    def step_s(self) -> float:
        """How long a step takes."""
        return max(worker.total_s for worker in self.workers)

    def gain(self, seconds: float) -> float:
        """Return the new throughput over the old where a step takes `seconds`."""
        return self.step_s / seconds if seconds > 0 else 1.0


def evidence_of(summary: Summary) -> Evidence | None:
    """Return what `summary` says; None where there is no plan, or a worker without a steady step."""
    workers = [_busy(worker) for worker in summary.per_worker]
    known = [worker for worker in workers if worker is not None]
    if summary.plan is None or summary.job is None or not known or len(known) < len(workers):
        return None
    cores, memory_bytes = _has(summary.cluster, len(known))
    return Evidence(
        plan=summary.plan,
        batch_size=min(summary.job.batch_size, summary.job.num_samples or summary.job.batch_size),
        steps=summary.steps,
        workers=tuple(known),
        loading={loading.rank: loading for loading in summary.loading},
        saves=summary.saves,
        communication=summary.communication,
        gradient_bytes=int(max(worker.state_bytes.get("parameters", 0.0) for worker in summary.per_worker)),
        cores=cores,
        memory_bytes=memory_bytes,
    )


def _has(cluster: Cluster | None, workers: int) -> tuple[float, float]:
    """Return the cores and the bytes of memory that each worker has at least; of a GPU that nobody knows, none."""
    if cluster is None:
        return 1.0, math.inf
    node = min(cluster.nodes, key=lambda each: each.cores)
    per_node = -(-workers // sum(each.count for each in cluster.nodes))
    cores = max(1.0, node.cores / per_node)
    if node.devices:
        device = cluster.devices.get(node.device)
        return cores, device.memory_bytes if device is not None else 0.0
    return cores, node.memory_bytes / per_node if node.memory_bytes else math.inf


def _busy(worker: Worker) -> Busy | None:
    total_s, samples = worker.total_s or 0.0, worker.samples or 0.0
    if not worker.parts or not worker.split or total_s <= 0 or samples <= 0:
        return None
    return Busy(
        rank=worker.rank,
        samples=samples,
        total_s=total_s,
        split=worker.split,
        passes_s=sum(worker.parts[name] for name in PASSES),
        median_passes_s=worker.median_passes_s,
        peak_bytes=worker.peak_bytes,
    )

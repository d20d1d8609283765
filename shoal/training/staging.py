"""The packs of a job brought next to the compute: decided when its workers start, by where the packs lie.

1. The plan says whether (`staging`): "off", "auto", or where to. Of itself a pack is staged if it lies on storage that
   hosts share, is not in memory, the job reads at least half of it, and storage of this node is clearly faster.
2. The first worker of each node decides for the node, and tells the others by the store: one measurement, one copy.
3. Parts come in the order in which the first epoch reads them, and a batch waits for its own parts alone. Which samples
   there are, and in which order, was settled before: where they are read from changes nothing but the time.
4. Where a run has several nodes, these pass the parts on to each other.
5. The copy goes with its last worker, however that ends (stage/copies.py).
"""

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed import PrefixStore, Store

from shoal.comm.mesh import position_of
from shoal.comm.rank import Rank
from shoal.comm.told import not_told
from shoal.core.errors import ConfigError, PeerLost, ShoalError
from shoal.data.order import Order
from shoal.data.stage.agent import Staging
from shoal.data.stage.copies import read_plan
from shoal.data.stage.first_reads import first_reads
from shoal.data.stage.moved import first_samples, moved_view
from shoal.data.stage.staged import Staged, in_place
from shoal.data.stage.staging import stage
from shoal.data.stage.worth import why_not
from shoal.data.view import View
from shoal.spec.job import Job
from shoal.spec.parts import cut
from shoal.spec.plan import Plan


@dataclass(frozen=True)
class Decision:
    """Where the pack of one field of the job is read, and why; the events of a node's first worker have it."""

    field: str
    """data or eval_data."""
    source: str
    path: str
    """Where it is read: the copy, or the pack itself."""
    is_staged: bool
    why: str

    def __str__(self) -> str:
        if self.is_staged:
            return f"Job.{self.field}: {self.source} is being staged to {self.path}. {self.why}"
        return f"Job.{self.field}: {self.source} is {self.why}"


@dataclass(frozen=True)
class StagedJob:
    """A job that reads its packs where they were brought."""

    job: Job
    decisions: tuple[Decision, ...] = ()


@contextmanager
def staged_job(job: Job, plan: Plan, *, rank: Rank, store: Store | None) -> Iterator[StagedJob]:
    """Bring the packs of `job` to this node, as the plan says, for the length of a `with` block.

    Called by every worker. The job that is returned can be trained at once: a part is waited for when it is read.
    """
    views = {name: view for name in ("data", "eval_data") if _is_to_stage(view := getattr(job, name))}
    if plan.staging == "off" or not views:
        yield StagedJob(job)
        return
    with ExitStack() as opened:
        node, placed, fields, decisions = _Node(plan, rank, store), dict[Path, Staged](), dict[str, Any](), []
        for name, view in views.items():
            source = view.pack.path.resolve()
            if source not in placed:
                placed[source] = opened.enter_context(node.place(job, name, view, source))
            staged = placed[source]
            is_staged = staged.path != source
            if is_staged:
                fields[name] = moved_view(view, staged)
            decisions.append(Decision(name, str(source), str(staged.path), is_staged, staged.reason))
        yield StagedJob(dataclasses.replace(job, **fields) if fields else job, tuple(decisions))


def _is_to_stage(data: Any) -> bool:
    """Return whether `data` is a pack that the job has not staged by itself."""
    return isinstance(data, View) and read_plan(data.pack.path) is None


class _Node:
    """The workers of this worker's node."""

    def __init__(self, plan: Plan, rank: Rank, store: Store | None) -> None:
        self._plan, self._rank = plan, rank
        self._first = rank.index - rank.local_index
        self._said = PrefixStore(f"staging of worker {self._first}", store) if store is not None else None
        has_others = rank.workers > rank.local_workers
        self._others = PrefixStore("staging", store) if store is not None and has_others else None

    @contextmanager
    def place(self, job: Job, name: str, view: View, source: Path) -> Iterator[Staged]:
        """Have the pack of `view` where the node's first worker decided. Called by every worker of the node."""
        with ExitStack() as opened:
            if self._rank.local_index > 0 and self._said is not None:
                staged = self._follow(self._heard(self._said, name), source)
            else:
                staged = self._decide(job, name, view, source)
            opened.enter_context(staged)
            yield staged

    def _decide(self, job: Job, name: str, view: View, source: Path) -> Staged:
        """Decide where the pack goes, and tell the others of this node."""
        told: dict[str, Any] = {}
        try:
            staged = self._choose(job, name, view, source)
            told = {"is_staged": isinstance(staged, Staging), "why": staged.reason}
        except ShoalError as error:
            told = {"error": str(error)}
            raise
        finally:
            if self._said is not None:
                self._said.set(name, json.dumps(told))
        return staged

    def _choose(self, job: Job, name: str, view: View, source: Path) -> Staged:
        is_trained_on = name == "data"
        num_reads = job.total_steps * job.batch_size if is_trained_on else view.num_samples
        if self._plan.staging == "auto":
            why = why_not(source, view.pack.manifest, read_fraction=num_reads / view.num_samples)
            if why is not None:
                return in_place(source, reason=why)
        is_shuffled = is_trained_on and job.shuffle
        order = Order(view.num_samples, seed=job.seed, is_shuffled=is_shuffled, block_rows=job.block_rows)
        parts = first_reads(
            first_samples(view), order, batch_size=job.batch_size, mine=self._mine(job), num_reads=num_reads
        )
        return self._stage(source, parts=parts or None)

    def _heard(self, said: Store, name: str) -> dict[str, Any]:
        """Return what the node's first worker says; PeerLost if somebody is lost before it does."""
        if not_told(said, [name], timeout_s=self._plan.timeout_s):
            raise PeerLost(
                f"worker {self._first} has not said within {self._plan.timeout_s:g} s where Job.{name} is read."
            )
        told: dict[str, Any] = json.loads(said.get(name))
        return told

    def _follow(self, told: dict[str, Any], source: Path) -> Staged:
        """Return the pack where the node's first worker, which has `told` us, decided."""
        if not told.keys() >= {"is_staged", "why"}:
            raise PeerLost(f"worker {self._first} could not stage {source}: {told.get('error', 'it failed')}")
        if not told["is_staged"]:
            return in_place(source, reason=told["why"])
        return self._stage(source)

    def _stage(self, source: Path, *, parts: list[int] | None = None) -> Staged:
        plan = self._plan
        try:
            return stage(source, to=plan.staging, parts=parts, store=self._others, timeout_s=plan.timeout_s)
        except ConfigError as error:  # it speaks to whoever wrote `shoal stage --to`
            raise ConfigError(str(error).replace("--to ", "--stage ", 1)) from None

    def _mine(self, job: Job) -> tuple[int, int]:
        """Return the places [begin, end) of a global batch that workers of this node load."""
        workers = range(self._first, self._first + self._rank.local_workers)
        indexes = [position_of(self._plan.mesh, worker).data for worker in workers]
        bounds = cut(job.batch_size, self._plan.shares)
        return bounds[min(indexes)], bounds[max(indexes) + 1]

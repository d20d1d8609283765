"""A run that loses workers goes on from memory, in any mesh, with the bits that they had and the losses of no loss."""

import dataclasses
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shoal.comm.rank import ALONE, Rank
from shoal.comm.shm.kept import open_room
from shoal.comm.store import connect
from shoal.core.errors import PeerLost
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml, write_toml
from shoal.fault.snapshot import Held
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.opening import opened
from shoal.training.resolve import resolve_plan
from shoal.training.run import Run
from shoal.training.saved import state_of
from shoal.training.snapshots import Keeping
from shoal.training.step import Stepper
from tests.support.jobs import linear
from tests.support.ranks import RankPool
from tests.support.training import largest_difference
from tests.training.test_resume import scheduled_gpt
from tests.training.test_resume_state import mixed, noisy

STEPS, STOPPED = 6, 3
_NONE = torch.empty(0)
_HELD: list[Sequence[Held]] = []
"""What this process of the pool holds from one run to the next."""


def adam(steps: int) -> Job:
    """A job whose optimizer keeps as much as most do."""
    return linear(steps=steps, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))


class Late(nn.Module):
    """A model of which a part is used only from the fourth forward on: the optimizer has no state for it before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.later = nn.Linear(5, 1), nn.Linear(5, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of one part, or of both."""
        self.calls: Tensor
        self.calls += 1
        output: Tensor = self.first(x)
        return output + self.later(x) if self.calls > 3 else output


def late(steps: int) -> Job:
    """A job whose optimizer has more to keep after some steps."""
    return linear(steps=steps, model=Late, optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.01))


JOBS = {"gpt": scheduled_gpt, "mixed": mixed, "noisy": noisy, "adam": adam, "late": late}
PLANS = {
    "one": Plan(),
    "2 replicas": Plan(mesh=Mesh(replicate=2)),
    "3 replicas": Plan(mesh=Mesh(replicate=3)),
    "ZeRO-1": Plan(mesh=Mesh(shard=2), zero=1),
    "ZeRO-2": Plan(mesh=Mesh(shard=2), zero=2),
    "ZeRO-3": Plan(mesh=Mesh(shard=3), zero=3),
    "ZeRO-3 and replicas": Plan(mesh=Mesh(replicate=2, shard=2), zero=3),
    "tensor": Plan(mesh=Mesh(tensor=2)),
    "pipeline": Plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=2)),
    "topk": Plan(mesh=Mesh(replicate=2), sync=Sync(codec="topk")),
}


class Failing:
    """An engine in whose place something goes wrong after forward and backward."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def forward(self, *arguments: Any) -> Any:
        """Do it."""
        return self._engine.forward(*arguments)

    def forward_backward(self, *arguments: Any) -> Any:
        """Do all of it, and raise."""
        self._engine.forward_backward(*arguments)
        raise PeerLost("worker 9 is gone")


@dataclasses.dataclass
class Did:
    """What a worker did."""

    began: int
    losses: list[float]
    first: dict[str, Any]
    last: dict[str, Any]
    held: list[int]


def part(
    rank: Rank,
    *,
    folder: Path,
    case: str,
    shared: Path,
    generation: int = 0,
    last: int = STEPS,
    every: str | int = "auto",
    holders: int = 0,
    fails: bool = False,
    hosts: int = 1,
) -> Did:
    """Be one worker of a generation, up to step `last`; the first `holders` hold what they had. Runs in the pool."""
    if generation == 0:
        random.seed(rank.index)  # as each process begins otherwise
        np.random.seed(rank.index)
    run_folder = RunFolder(folder)
    log = EventLog(run_folder.events_of(rank.index))
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    host = shared / f"host-{rank.index * hosts // rank.workers}"
    host.mkdir(parents=True, exist_ok=True)
    room = open_room("test", shared=host)
    keeping = Keeping(room, generation, every, _HELD.pop() if rank.index < holders else ())
    _HELD.clear()
    job, plan = JOBS[case](STEPS), read_toml(Plan, run_folder.plan_toml)
    with opened(job, plan, run_folder, rank=rank, store=store, log=log, keeping=keeping) as run:
        did = Did(run.step_count, [], mine(run), {}, [])
        for batch in run.batches():
            did.losses.append(run.step(batch))
            if run.step_count == last:
                break
        did.last = mine(run)
        if fails:
            fail(run)
        _HELD.append(run.snapshots.held())
        did.held = [held.step for held in _HELD[0]]
        if last == STEPS:
            run.finish()
    room.close()
    log.close()
    return did


def fail(run: Run) -> None:
    """Begin a step that is never done."""
    assert isinstance(run._stepper, Stepper)
    run._stepper._engine = Failing(run.engine)
    with pytest.raises(PeerLost):
        run.step(next(run.batches()))


def mine(run: Run) -> dict[str, Any]:
    """Return what this worker would save."""
    shards = [shard for shard in state_of(run).shards if shard.is_mine]
    return {f"{s.name}@{s.offset}": (s.name, s.shape, s.offset, s.tensor.clone()) for s in shards}


def whole(parts: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Return the whole tensors of which workers have saved slices; not what is each worker's own."""
    found: dict[str, Tensor] = {}
    for name, shape, offset, tensor in (value for each in parts for value in each.values()):
        if not name.startswith("codec/"):
            place = found.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
            for dim, (at, size) in enumerate(zip(offset, tensor.shape, strict=True)):
                place = place.narrow(dim, at, size)
            place.copy_(tensor)
    return found


def differing(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> list[str]:
    """Return the names of tensors that two sets of workers do not have alike, bit for bit."""
    first, second = whole(one), whole(other)
    return [n for n in first.keys() | second.keys() if not torch.equal(first.get(n, _NONE), second.get(n, _NONE))]


def trained(
    ranks: RankPool, plan: Plan, case: str, path: Path, *, be: Callable[..., Did] = part, **more: Any
) -> list[Did]:
    """Let the workers of `plan` train; `be` is what each does."""
    path.mkdir(exist_ok=True)
    plan, _ = resolve_plan(JOBS[case](STEPS), plan)
    folder = RunFolder.create(path, None, stem="run")
    write_toml(folder.plan_toml, plan)
    if plan.workers == 1:
        return [be(ALONE, folder=folder.path, case=case, shared=path / "shared", **more)]
    return ranks.run(be, workers=plan.workers, folder=folder.path, case=case, shared=path / "shared", **more)


@pytest.fixture(scope="module")
def undisturbed(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return trained(ranks, Plan(), "gpt", tmp_path_factory.mktemp("undisturbed"))[0].losses


PAIRS = [
    ("ZeRO-3", "ZeRO-2"),
    ("ZeRO-2", "one"),
    ("ZeRO-1", "3 replicas"),
    ("ZeRO-3 and replicas", "ZeRO-3"),
    ("tensor", "pipeline"),
    ("pipeline", "tensor"),
    ("one", "ZeRO-1"),
    ("3 replicas", "ZeRO-2"),
]


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_where_all_are_dead_the_next_workers_go_on_from_the_hosts_memory(
    before: str, after: str, ranks: RankPool, tmp_path: Path, undisturbed: list[float]
) -> None:
    first = trained(ranks, PLANS[before], "gpt", tmp_path, last=STOPPED, every=1)
    second = trained(ranks, PLANS[after], "gpt", tmp_path, generation=1)
    assert [did.began for did in second] == [STOPPED] * PLANS[after].workers
    assert differing([did.last for did in first], [did.first for did in second]) == []
    assert largest_difference(first[0].losses + second[0].losses, undisturbed) < 1e-5


@pytest.mark.parametrize(
    ("before", "after"), [("3 replicas", "2 replicas"), ("ZeRO-2", "ZeRO-2"), ("2 replicas", "ZeRO-3")]
)
def test_the_living_hold_the_state_of_their_last_step_whatever_they_were_in(
    before: str, after: str, ranks: RankPool, tmp_path: Path, undisturbed: list[float]
) -> None:
    first = trained(ranks, PLANS[before], "gpt", tmp_path, last=STOPPED, every="never", fails=True)
    assert [did.held for did in first] == [[STOPPED]] * PLANS[before].workers
    second = trained(ranks, PLANS[after], "gpt", tmp_path, generation=1, holders=len(first))
    assert differing([did.last for did in first], [did.first for did in second]) == []
    assert largest_difference(first[0].losses + second[0].losses, undisturbed) < 1e-5


@pytest.mark.parametrize("case", ["mixed", "noisy"])
@pytest.mark.parametrize("plan", ["2 replicas", "one", "ZeRO-2"])
def test_buffers_and_random_states_are_those_before_the_step_that_was_never_done(
    case: str, plan: str, ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    expected = trained(ranks, PLANS[plan], case, tmp_path / "a")
    trained(ranks, PLANS[plan], case, tmp_path, last=STOPPED, every=1, fails=True)
    second = trained(ranks, PLANS[plan], case, tmp_path, generation=1, holders=4)
    assert [did.losses for did in second] == [did.losses[STOPPED:] for did in expected]
    assert differing([did.last for did in second], [did.last for did in expected]) == []


def test_what_a_codec_has_not_sent_is_what_it_was_before_the_step_that_was_never_done(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    expected = trained(ranks, PLANS["topk"], "adam", tmp_path / "a")
    trained(ranks, PLANS["topk"], "adam", tmp_path, last=STOPPED, fails=True)
    second = trained(ranks, PLANS["topk"], "adam", tmp_path, generation=1, holders=4)
    assert [did.losses for did in second] == [did.losses[STOPPED:] for did in expected]


def test_auto_goes_on_with_the_codec_of_the_workers_memory_whatever_it_would_choose(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    expected = trained(ranks, PLANS["topk"], "adam", tmp_path / "a")
    trained(ranks, PLANS["topk"], "adam", tmp_path, last=STOPPED, fails=True)
    auto = dataclasses.replace(PLANS["topk"], sync=Sync(codec="auto"))  # on one host it would take none
    second = trained(ranks, auto, "adam", tmp_path, generation=1, holders=4)
    assert [did.losses for did in second] == [did.losses[STOPPED:] for did in expected]


def test_where_a_host_is_lost_another_has_the_state_of_all_its_workers(
    ranks: RankPool, tmp_path: Path, undisturbed: list[float]
) -> None:
    plan = PLANS["ZeRO-3 and replicas"]
    first = trained(ranks, plan, "gpt", tmp_path, last=4, every=1, hosts=2)
    shutil.rmtree(tmp_path / "shared" / "host-1")
    second = trained(ranks, PLANS["ZeRO-2"], "gpt", tmp_path, generation=1)
    assert [did.began for did in second] == [4, 4]
    assert differing([did.last for did in first], [did.first for did in second]) == []
    assert largest_difference(first[0].losses + second[0].losses, undisturbed) < 1e-5


def test_a_worker_that_joins_gets_everything_from_the_others(ranks: RankPool, tmp_path: Path) -> None:
    first = trained(ranks, PLANS["2 replicas"], "adam", tmp_path, last=STOPPED)
    second = trained(ranks, PLANS["3 replicas"], "adam", tmp_path, generation=1, holders=2)
    assert [did.began for did in second] == [STOPPED] * 3
    assert differing([did.last for did in first], [did.first for did in second]) == []

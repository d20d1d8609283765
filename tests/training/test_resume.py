"""Resume is exact: stopping after any step and going on gives the losses of never stopping, under every mesh.

With --full-size every step of every mesh is tried, and every mesh after every step of every other; without, a part.
"""

import dataclasses
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.parallel_cases import gpt
from shoal.comm.rank import ALONE, Rank
from shoal.comm.store import connect
from shoal.core.events import EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import write_toml
from shoal.fault.checkpoint.manifest import committed
from shoal.spec.job import Job
from shoal.spec.plan import Batch, Checkpoints, Mesh, Plan
from shoal.spec.sync import Sync
from shoal.training.loop import train_all
from shoal.training.opening import open_run
from shoal.training.resolve import resolve_plan
from tests.support.ranks import RankPool
from tests.support.training import largest_difference

STEPS = 7  # the sixth batch is the partial one of an epoch
EVERY_STEP = Checkpoints(every_steps=1, keep=100)
MESHES = {
    "one process": Plan(),
    "replicas": Plan(mesh=Mesh(replicate=2)),
    "replicas, over wires": Plan(mesh=Mesh(replicate=2), sync=Sync(way="ring")),
    "unequal replicas": Plan(mesh=Mesh(replicate=3), batch=Batch(shares=(0.5, 0.25, 0.25))),
    "ZeRO-1": Plan(mesh=Mesh(shard=2), zero=1),
    "ZeRO-2, accumulated": Plan(mesh=Mesh(shard=2), zero=2, batch=Batch(micro_batch=3)),
    "ZeRO-3 and replicas": Plan(mesh=Mesh(replicate=2, shard=2), zero=3),
    "tensor": Plan(mesh=Mesh(tensor=2)),
    "pipeline": Plan(mesh=Mesh(pipeline=2), batch=Batch(micro_batch=2)),
    "3-D": Plan(mesh=Mesh(pipeline=2, shard=2, tensor=2), zero=3, batch=Batch(micro_batch=2)),
}


def scheduled_gpt(steps: int) -> Job:
    """A small GPT with AdamW, clipping, and a learning rate that changes in every step."""
    schedule = lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)  # noqa: E731
    return dataclasses.replace(gpt(steps=steps, layers=2), schedule=schedule)


def part(rank: Rank, *, folder: Path, steps: int) -> None:
    """Be one worker. Runs in the pool."""
    run_folder = RunFolder(folder)
    log = EventLog(run_folder.events_of(rank.index))
    store = connect(rank, timeout_s=60) if rank.workers > 1 else None
    try:
        with open_run(scheduled_gpt(steps), run_folder, rank=rank, store=store, log=log) as run:
            train_all(run)
    finally:
        log.close()


def begun(path: Path, plan: Plan, *, checkpoint: Path | None = None, settings: Checkpoints | None = None) -> RunFolder:
    """Make a run folder for `plan`, with a copy of `checkpoint` in it."""
    plan, _ = resolve_plan(scheduled_gpt(STEPS), dataclasses.replace(plan, checkpoint=settings or Checkpoints()))
    folder = RunFolder.create(path, None, stem="run")
    write_toml(folder.plan_toml, plan)
    if checkpoint is not None:
        shutil.copytree(checkpoint, folder.checkpoints / checkpoint.name)
    return folder


def trained(ranks: RankPool, folder: RunFolder, plan: Plan, *, steps: int = STEPS) -> dict[int, float]:
    """Train in `folder` and return the loss of each step."""
    if plan.workers == 1:
        part(ALONE, folder=folder.path, steps=steps)
    else:
        ranks.run(part, workers=plan.workers, folder=folder.path, steps=steps)
    return losses(folder)


def losses(folder: RunFolder) -> dict[int, float]:
    return {e["step"]: e["loss"] for e in EventReader(folder.events_of(0)).poll() if e["kind"] == "step"}


_WHOLE: dict[str, tuple[RunFolder, dict[int, float]]] = {}


def never_stopped(title: str, ranks: RankPool, factory: pytest.TempPathFactory) -> tuple[RunFolder, dict[int, float]]:
    """Return the run that never stopped, made once, with a checkpoint of every step."""
    if title not in _WHOLE:
        plan = MESHES[title]
        folder = begun(factory.mktemp("whole"), plan, settings=EVERY_STEP)
        _WHOLE[title] = folder, trained(ranks, folder, plan)
    return _WHOLE[title]


@pytest.mark.parametrize("title", MESHES)
def test_resume_at_every_step_gives_the_same_losses(
    title: str,
    ranks: RankPool,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> None:
    whole, expected = never_stopped(title, ranks, tmp_path_factory)
    checkpoints = committed(whole.checkpoints)
    assert len(checkpoints) == STEPS
    for step, checkpoint in enumerate(checkpoints[:-1], start=1):
        if (step + list(MESHES).index(title)) % (STEPS - 1) and not request.config.getoption("--full-size"):
            continue  # a step for each mesh, in turn; all steps of all meshes take minutes
        plan = MESHES[title]
        found = trained(ranks, begun(tmp_path, plan, checkpoint=checkpoint), plan)
        assert list(found) == list(range(step + 1, STEPS + 1))
        # Exact but for DDP, which makes its buckets anew after the first step of a process.
        expected_now = [expected[each] for each in found]
        if MESHES[title].sync.way == "ring" or "unequal" in title:
            assert largest_difference(list(found.values()), expected_now) < 1e-6
        else:
            assert list(found.values()) == expected_now


@pytest.mark.parametrize("title", MESHES)
def test_other_meshes_go_on_from_a_checkpoint(
    title: str,
    ranks: RankPool,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> None:
    whole, _ = never_stopped(title, ranks, tmp_path_factory)
    _, expected = never_stopped("one process", ranks, tmp_path_factory)
    is_all = request.config.getoption("--full-size")
    titles = list(MESHES)
    number = titles.index(title)
    others = [titles[(number + ahead) % len(titles)] for ahead in (range(1, len(titles)) if is_all else [3])]
    for step, other in product(range(1, STEPS) if is_all else [3], others):
        plan, checkpoint = MESHES[other], committed(whole.checkpoints)[step - 1]
        found = trained(ranks, begun(tmp_path, plan, checkpoint=checkpoint), plan)
        assert list(found) == list(range(step + 1, STEPS + 1))
        assert largest_difference(list(found.values()), [expected[each] for each in found]) < 1e-5, (step, other)


def test_writing_checkpoints_changes_no_result(
    ranks: RankPool, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    for title in ("one process", "replicas", "ZeRO-3 and replicas"):
        _, expected = never_stopped(title, ranks, tmp_path_factory)
        assert trained(ranks, begun(tmp_path, MESHES[title]), MESHES[title]) == expected


def test_a_run_writes_down_what_a_checkpoint_took(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder, _ = never_stopped("replicas", ranks, tmp_path_factory)
    for rank in range(2):
        events: list[dict[str, Any]] = EventReader(folder.events_of(rank)).poll()
        written = [event for event in events if event["kind"] == "checkpoint"]
        assert [event["step"] for event in written] == list(range(1, STEPS + 1))
        assert all(event["stall_s"] > 0 and event["write_s"] > 0 and event["bytes"] > 0 for event in written)

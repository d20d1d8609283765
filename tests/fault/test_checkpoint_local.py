"""Checkpoints by way of the nodes' own storage: two workers with a folder each stand for two nodes."""

import json
import os
import shutil
from pathlib import Path

import pytest

from shoal.comm.rank import ALONE, Rank
from shoal.core.errors import NonFiniteLoss
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.fault import inject
from shoal.fault.checkpoint.local import local_folder
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.fault.checkpoint.reader import Checkpoint
from shoal.spec.job import Job
from shoal.spec.plan import Checkpoints, Mesh, Plan
from tests.support.jobs import linear
from tests.support.ranks import RankPool
from tests.support.training import bare_folder, train_part

TWO_NODES = Plan(mesh=Mesh(replicate=2), checkpoint=Checkpoints(every_steps=2, local="$SHOAL_TEST_NODE/local"))


def part_on_a_node(
    rank: Rank, *, nodes: Path, folder: Path, steps: int, faults: tuple[inject.Fault, ...] = ()
) -> tuple[list[float], list[int]]:
    """Be the worker of a node of its own; return its losses, and the steps that its node holds at the end."""
    os.environ["SHOAL_TEST_NODE"] = str(nodes / f"node-{rank.index}")
    inject.begin(rank.index, faults)
    try:
        trace = train_part(
            rank, builder="tests.support.jobs:linear", arguments={"steps": steps}, plan=Plan(), folder=folder
        )
    finally:
        inject.end()
    local = local_folder(TWO_NODES.checkpoint.local, folder)
    assert local is not None
    return trace.losses, [step_of(path) for path in local.glob("step-*")]


def steps_in(folder: Path) -> list[int]:
    return [step_of(path) for path in committed(RunFolder(folder).checkpoints)]


def events(folder: Path, rank: int) -> list[dict[str, object]]:
    return [e for e in EventReader(RunFolder(folder).events_of(rank)).poll() if e["kind"] == "checkpoint"]


def test_checkpoints_reach_the_run_folder_whole_and_leave_the_nodes(ranks: RankPool, tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, TWO_NODES)
    found = ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=6)
    assert [held for _, held in found] == [[], []]
    assert steps_in(folder) == [4, 6]
    assert [Checkpoint(path).damage() for path in committed(RunFolder(folder).checkpoints)] == ["", ""]
    assert all("local_s" in event for rank in range(2) for event in events(folder, rank))
    plain = bare_folder(tmp_path, Plan(mesh=Mesh(replicate=2)))
    whole = ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=plain, steps=6)
    assert found[0][0] == whole[0][0]


def test_what_was_only_on_the_nodes_is_copied_when_the_run_is_gone_on_with(ranks: RankPool, tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, TWO_NODES)
    # The run folder's disk is full when worker 1 copies step 4: on the nodes it stays.
    full = (inject.fill_disk(1, 4, point="checkpoint: copying out"),)
    found = ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=5, faults=full)
    shutil.rmtree(RunFolder(folder).checkpoints / "step-00000005")  # written at the end: as if it had never come
    assert [held for _, held in found] == [[], []]  # that of the end made those of step 4 superfluous
    assert steps_in(folder) == [2]

    again = (inject.fill_disk(1, 6, point="checkpoint: copying out"),)
    found = ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=6, faults=again)
    assert [held for _, held in found] == [[6], [6]]
    assert steps_in(folder) == [2, 4]
    found = ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=7)
    assert len(found[0][0]) == 1  # step 7 alone: from step 6
    assert [held for _, held in found] == [[], []]
    assert steps_in(folder) == [6, 7]


def test_a_checkpoint_of_which_a_node_is_gone_is_left_alone(ranks: RankPool, tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, TWO_NODES)
    full = (inject.fill_disk(0, 4, point="checkpoint: copying out"),)
    ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=4, faults=full)
    shutil.rmtree(tmp_path / "node-1")
    found = ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=6)
    assert len(found[0][0]) == 4  # from step 2
    assert steps_in(folder) == [4, 6]


def test_parts_of_different_attempts_are_not_mixed(ranks: RankPool, tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, TWO_NODES)
    full = (inject.fill_disk(0, 4, point="checkpoint: copying out"),)
    ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=4, faults=full)
    (part,) = (tmp_path / "node-1").rglob("worker-1.part.json")
    part.write_text(json.dumps({**json.loads(part.read_text()), "attempt": "another"}))
    found = ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=5)
    assert len(found[0][0]) == 3  # from step 2


def test_what_a_run_has_left_on_the_nodes_is_not_for_another_under_its_path(ranks: RankPool, tmp_path: Path) -> None:
    folder = bare_folder(tmp_path, TWO_NODES)
    full = (inject.fill_disk(1, 4, point="checkpoint: copying out"),)
    found = ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=4, faults=full)
    assert [held for _, held in found] == [[4], [4]]
    shutil.rmtree(folder)
    assert bare_folder(tmp_path, TWO_NODES) == folder
    found = ranks.run(part_on_a_node, workers=2, nodes=tmp_path, folder=folder, steps=5)
    assert len(found[0][0]) == 5  # from the beginning
    assert [held for _, held in found] == [[], []]


def test_a_run_whose_id_cannot_be_written_says_so_and_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = Plan(checkpoint=Checkpoints(every_steps=2, local=str(tmp_path / "local")))
    folder = bare_folder(tmp_path, plan)
    RunFolder(folder).checkpoints.touch()
    trace = train_part(ALONE, builder="tests.support.jobs:linear", arguments={"steps": 2}, plan=plan, folder=folder)
    assert len(trace.losses) == 2
    assert "will not be found when the run is gone on with" in capsys.readouterr().err


def test_where_the_node_has_no_room_it_is_written_to_the_run_folder_and_that_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    plan = Plan(checkpoint=Checkpoints(every_steps=2, local=str(tmp_path / "file")))
    folder = bare_folder(tmp_path, plan)
    train_part(ALONE, builder="tests.support.jobs:linear", arguments={"steps": 2}, plan=plan, folder=folder)
    assert steps_in(folder) == [2]
    assert "Worker 0 could not write to" in capsys.readouterr().err


def exploding(steps: int) -> Job:
    """A regression of which the loss is not finite after a few steps."""
    return linear(steps=steps, loss=lambda output, batch: (output - batch[1]).square().mean() * 1e30)


def test_an_error_waits_for_the_copy_under_way(tmp_path: Path) -> None:
    plan = Plan(checkpoint=Checkpoints(every_steps=1, keep=100, local=str(tmp_path / "local")))
    folder = bare_folder(tmp_path, plan)
    inject.begin(0, [inject.slow(0, 1, seconds=0.2, steps=100, point="checkpoint: copying out")])
    try:
        with pytest.raises(NonFiniteLoss):
            train_part(
                ALONE,
                builder="tests.fault.test_checkpoint_local:exploding",
                arguments={"steps": 50},
                plan=plan,
                folder=folder,
            )
    finally:
        inject.end()
    steps = [e["step"] for e in EventReader(RunFolder(folder).events_of(0)).poll() if e["kind"] == "step"]
    assert steps_in(folder)[-1] == steps[-1]
    assert [e["step"] for e in events(folder, 0)] == steps
    assert not list((tmp_path / "local").rglob("*.safetensors"))

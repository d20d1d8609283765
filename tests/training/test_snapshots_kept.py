"""What is kept in memory, and where: not in the middle of an update, not without room, not after an orderly end."""

from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.rank import ALONE, Rank
from shoal.comm.shm.kept import Room, open_room
from shoal.core.errors import PeerLost
from shoal.core.events import EventLog, EventReader
from shoal.core.run_folder import RunFolder
from shoal.fault.exchange import Offer, newest_covered
from shoal.fault.snapshot import held_on_host
from shoal.fault.snapshot_moves import Moves
from shoal.spec.plan import Plan
from shoal.training import snapshot_pace
from shoal.training.opening import opened
from shoal.training.snapshots import Keeping
from tests.support.jobs import linear
from tests.support.ranks import RankPool
from tests.training.test_snapshots import PLANS, STEPS, STOPPED, Did, differing, part, trained


def test_in_the_middle_of_an_update_nothing_is_held(tmp_path: Path) -> None:
    def broken(parameters: Any) -> Any:
        class Broken(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                if self.state_dict()["state"]:
                    raise PeerLost("in the middle of it")
                return super().step(closure)

        return Broken(parameters, lr=0.1, momentum=0.9)

    folder = RunFolder.create(tmp_path, None, stem="run")
    log = EventLog(folder.events_of(0))
    keeping = Keeping(None, 0, "never")
    with opened(linear(optimizer=broken), Plan(), folder, rank=ALONE, store=None, log=log, keeping=keeping) as run:
        assert [held.step for held in run.snapshots.held()] == [0]
        batches = run.batches()
        run.step(next(batches))
        batch = next(batches)
        with pytest.raises(PeerLost):
            run.step(batch)
        assert run.step_count == 1
        assert run.snapshots.held() == []
    log.close()


def test_without_memory_for_snapshots_that_is_said_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Room, "free_bytes", lambda _: 1000)
    (did,) = trained(RankPool(), Plan(), "adam", tmp_path)
    assert len(did.losses) == STEPS
    said = capsys.readouterr().err
    assert said.count("No snapshots are kept: worker 0 has no room") == 1
    assert "from the last checkpoint" in said


def test_state_that_an_optimizer_has_only_later_is_kept_too(tmp_path: Path) -> None:
    whole, *_ = trained(RankPool(), Plan(), "late", tmp_path / "a")
    (first,) = trained(RankPool(), Plan(), "late", tmp_path, last=5, every=1)
    (second,) = trained(RankPool(), Plan(), "late", tmp_path, generation=1)
    assert second.began == 5
    assert "optimizer/exp_avg/later.weight" in {name.partition("@")[0] for name in second.first}
    assert differing([first.last], [second.first]) == []
    assert first.losses + second.losses == whole.losses


def broken(*_: Any) -> int:
    raise RuntimeError("the memory is broken")


def test_copies_that_fail_end_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Moves, "make", broken)
    (did,) = trained(RankPool(), Plan(), "adam", tmp_path)
    assert len(did.losses) == STEPS
    said = capsys.readouterr().err
    assert said.count("Worker 0 keeps no snapshots any more (the memory is broken). If a worker dies, training") == 1
    assert held_on_host(open_room("test", shared=tmp_path / "shared" / "host-0")) == []


def breaking(rank: Rank, **more: Any) -> Did:
    """Be one worker, of which the second cannot copy. Runs in the pool."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot_pace, "_FIRST", 4)
        if rank.index == 1:
            patch.setattr(Moves, "make", broken)
        return part(rank, **more)


@pytest.mark.parametrize("plan", ["ZeRO-2", "2 replicas"])
def test_where_one_worker_keeps_no_copies_any_more_the_others_go_on_and_keep_none_either(
    plan: str, ranks: RankPool, tmp_path: Path
) -> None:
    expected = trained(ranks, PLANS[plan], "adam", tmp_path / "a")
    found = trained(ranks, PLANS[plan], "adam", tmp_path, be=breaking, every=1)
    assert [did.losses for did in found] == [did.losses for did in expected]
    events = EventReader(tmp_path / "run-1" / "events" / "rank-0.jsonl").poll()
    assert not [event for event in events if event["kind"] == "snapshot"], "nothing was agreed on"


def test_where_memory_covers_nothing_the_run_begins_as_it_would_without(ranks: RankPool, tmp_path: Path) -> None:
    expected = trained(ranks, PLANS["ZeRO-2"], "adam", tmp_path)
    (tmp_path / "b").mkdir()
    again = trained(ranks, PLANS["ZeRO-2"], "adam", tmp_path / "b", generation=1)
    assert [did.losses for did in again] == [did.losses for did in expected]


def test_an_orderly_end_leaves_no_snapshot_and_its_cost_in_the_events(ranks: RankPool, tmp_path: Path) -> None:
    trained(ranks, PLANS["ZeRO-2"], "adam", tmp_path, every=2)
    room = open_room("test", shared=tmp_path / "shared" / "host-0")
    assert held_on_host(room) == []
    events = EventReader(tmp_path / "run-1" / "events" / "rank-0.jsonl").poll()
    (event,) = [event for event in events if event["kind"] == "snapshot"]
    assert (event["every"], event["count"]) == (2, STEPS // 2)
    assert event["bytes"] > 0


def test_replicas_copy_each_a_part(ranks: RankPool, tmp_path: Path) -> None:
    trained(ranks, PLANS["2 replicas"], "adam", tmp_path, last=STOPPED, every=1)
    found = held_on_host(open_room("test", shared=tmp_path / "shared" / "host-0"))
    assert sorted((held.worker, held.step) for held in found) == [(0, 2), (0, 3), (1, 2), (1, 3)]
    assert {(held.part, held.parts) for held in found} == {(0, 2), (1, 2)}
    names = [{shard.name for shard in held.shards} for held in found if held.step == 3]
    assert not set.intersection(*names), "what is small has one who copies it"
    assert {"model/0.weight", "model/0.bias"} <= set.union(*names)
    assert newest_covered([Offer(h.generation, h.step, h.worker, h.part, h.parts) for h in found]) == (0, 3)


def test_replicas_on_several_hosts_copy_nothing_unless_the_plan_says_so(ranks: RankPool, tmp_path: Path) -> None:
    trained(ranks, PLANS["2 replicas"], "adam", tmp_path, last=STOPPED, hosts=2)
    for host in range(2):
        assert held_on_host(open_room("test", shared=tmp_path / "shared" / f"host-{host}")) == []

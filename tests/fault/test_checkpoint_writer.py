"""Writing checkpoints where a worker is lost meanwhile: nothing is committed, and nothing is written any more."""

import dataclasses
import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.rank import ALONE
from shoal.comm.store import LOOPBACK, host_store
from shoal.core.errors import PeerLost
from shoal.core.events import EventLog
from shoal.core.run_folder import RunFolder
from shoal.fault.checkpoint import commit, manifest, part
from shoal.fault.checkpoint.direct import write_directly
from shoal.fault.checkpoint.manifest import committed, folder_of, step_of
from shoal.fault.checkpoint.writer import Checkpointer
from shoal.fault.checkpoint.written import Written
from shoal.fault.shards import SavedState, whole_shard
from shoal.spec.plan import Plan
from shoal.training.opening import opened
from tests.support.jobs import linear


def state() -> SavedState:
    return SavedState([whole_shard("model/weight", torch.arange(6.0))], {"random": 1}, {"metrics": {}})


def lost() -> None:
    raise PeerLost("worker 1 has ended without a word.")


def lost_to_the_loop() -> None:
    if threading.current_thread() is threading.main_thread():
        lost()


def test_a_checkpoint_whose_other_part_does_not_come_is_given_up(tmp_path: Path) -> None:
    store, _ = host_store(host=LOOPBACK, timeout_s=60)
    writer = Checkpointer(tmp_path, index=0, number=0, workers=2, store=store, timeout_s=600, check=lost_to_the_loop)
    writer.save(state, 4)
    with pytest.raises(PeerLost):
        writer.wait()
    assert writer.close(wait_s=600) == []
    assert committed(tmp_path) == []
    assert not any(one.thread.is_alive() for one in writer._under_way)


def test_its_thread_ends_by_itself_when_a_worker_is_lost(tmp_path: Path) -> None:
    store, _ = host_store(host=LOOPBACK, timeout_s=60)
    writer = Checkpointer(tmp_path, index=0, number=0, workers=2, store=store, timeout_s=600, check=lost)
    writer.save(state, 4)
    (one,) = writer._under_way
    one.thread.join(60)
    assert not one.thread.is_alive()
    assert writer.ended() == []
    assert committed(tmp_path) == []


def test_who_gives_up_waits_for_a_thread_that_the_disk_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_held, goes_on = threading.Event(), threading.Event()

    def held(*arguments: Any) -> str:
        is_held.set()
        assert goes_on.wait(60)
        return write_directly(*arguments)

    monkeypatch.setattr(part, "write_directly", held)
    writer = Checkpointer(tmp_path, index=0, number=0, workers=1, store=None, timeout_s=60)
    writer.save(state, 4)
    assert is_held.wait(60)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(writer.close, wait_s=0.0, give_up_s=60)
        with pytest.raises(TimeoutError):
            closing.result(0.2)
        goes_on.set()
        assert closing.result(60) == []
    assert not any(one.thread.is_alive() for one in writer._under_way)
    assert committed(tmp_path) == []
    assert not (folder_of(tmp_path, 4) / "worker-0.json").exists(), "what follows in a folder that others may have"


@pytest.mark.parametrize(("member", "waits_s"), [("0.0", 60), ("", 2)])
def test_who_goes_on_after_a_loss_waits_for_that_and_who_ends_does_not(
    member: str, waits_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited = []
    close = Checkpointer.close

    def noted(writer: Checkpointer, *, wait_s: float, give_up_s: float = 2) -> list[Written]:
        waited.append(give_up_s)
        return close(writer, wait_s=wait_s, give_up_s=give_up_s)

    monkeypatch.setattr(Checkpointer, "close", noted)
    folder = RunFolder.create(tmp_path, "run", stem="run")
    rank, log = dataclasses.replace(ALONE, member=member), EventLog(folder.events_of(0))
    with pytest.raises(PeerLost), opened(linear(), Plan(timeout_s=60), folder, rank=rank, store=None, log=log):
        lost()
    log.close()
    assert waited == [waits_s]


def test_one_that_does_not_come_in_time_is_named(tmp_path: Path) -> None:
    store, _ = host_store(host=LOOPBACK, timeout_s=60)
    writer = Checkpointer(tmp_path, index=0, number=0, workers=3, store=store, timeout_s=0.2)
    store.set("save/1/1", "{}")
    writer.save(state, 4)
    (written,) = writer.wait()
    assert "nothing was heard for 0.2 s of worker 2" in written.error
    assert "There is none before it." in written.error


def test_several_follow_each_other_and_each_is_told_once(tmp_path: Path) -> None:
    writer = Checkpointer(tmp_path, index=0, number=0, workers=1, store=None, timeout_s=60, keep=9)
    told = []
    for step in range(1, 6):
        writer.make_way()
        told += writer.ended()
        writer.save(state, step)
    told += writer.wait()
    assert [written.step for written in told] == [1, 2, 3, 4, 5]
    assert not any(written.error for written in told)
    assert len(committed(tmp_path)) == 5
    assert writer.wait() == []


def refused(path: Path) -> None:
    raise OSError(errno.EROFS, "Read-only file system", str(path))


def test_an_old_one_that_cannot_be_removed_takes_no_other_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = manifest.remove
    stuck = folder_of(tmp_path, 1)
    monkeypatch.setattr(manifest, "remove", lambda path: refused(path) if path == stuck else remove(path))
    writer = Checkpointer(tmp_path, index=0, number=0, workers=1, store=None, timeout_s=60, keep=1)
    told = []
    for step in (1, 2, 3):
        writer.save(state, step)
        told += writer.wait()
    assert [written.error for written in told] == ["", "", ""]
    assert "of step 2 is there, but an older one could not be removed: [Errno 30] Read-only" in told[1].note
    assert [step_of(path) for path in committed(tmp_path)] == [1, 3]


def test_where_what_was_not_committed_cannot_be_removed_the_others_are_told_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit, "remove", refused)
    store, _ = host_store(host=LOOPBACK, timeout_s=60)
    store.set("save/1/1", '{"error": "worker 1 has no room."}')
    writer = Checkpointer(tmp_path, index=0, number=0, workers=2, store=store, timeout_s=60)
    writer.save(state, 4)
    (written,) = writer.wait()
    assert written.error == "worker 1 has no room."
    assert store.check(["save/1/outcome"])
    assert committed(tmp_path) == []

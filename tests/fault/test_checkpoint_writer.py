"""Writing checkpoints where a worker is lost meanwhile: nothing is committed, and nothing is written any more."""

import threading
from pathlib import Path

import pytest
import torch

from shoal.comm.store import LOOPBACK, host_store
from shoal.core.errors import PeerLost
from shoal.fault.checkpoint.manifest import committed
from shoal.fault.checkpoint.writer import Checkpointer
from shoal.fault.shards import SavedState, whole_shard


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

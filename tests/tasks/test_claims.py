"""Bunches are taken by one job each, given back when the job is gone, and then run only for what is left."""

import threading
from pathlib import Path

import pytest

from shoal.core.errors import WorkerFailed
from shoal.tasks import claims
from shoal.tasks.call import refer
from shoal.tasks.claims import Bunch, Holder
from shoal.tasks.folder import TaskFolder
from shoal.tasks.journal import Journal, Record
from tests.tasks import work


@pytest.fixture
def folder(tmp_path: Path) -> TaskFolder:
    return TaskFolder.begin(tmp_path / "a 'map' é", refer(work.double), list(range(20)))


def test_of_many_takers_each_bunch_has_one(folder: TaskFolder) -> None:
    for number in range(100):
        claims.offer(folder, number, [number])
    got: list[Bunch] = []

    def taker(name: str) -> None:
        while (bunch := claims.take(folder, Holder("7", 0, name))) is not None:
            got.append(bunch)

    threads = [threading.Thread(target=taker, args=(f"host-{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(bunch.tasks[0] for bunch in got) == list(range(100))
    assert len({bunch.path for bunch in got}) == 100


def test_what_a_dead_job_held_is_run_by_another_except_what_was_done(folder: TaskFolder) -> None:
    claims.offer(folder, 0, [1, 2, 3])
    claims.offer(folder, 1, [4])
    first = claims.take(folder, Holder("12_3", 0, "node1-5"))
    assert first is not None
    journal = Journal(folder.done, "12_3")
    journal.append(Record(2, has_failed=False, seconds=0.1, data=b""))
    journal.close()
    assert claims.covered(folder) == {1, 2, 3, 4}
    assert claims.next_number(folder) == 2
    assert claims.give_back_of(folder, lambda holder: holder.job == "12_4") == 0
    assert claims.give_back_of(folder, lambda holder: holder.job == "12_3") == 1
    assert not first.is_ours()
    again = claims.take(folder, Holder("12_4", 0, "node2-5"))
    assert again is not None
    assert again.tasks == [1, 3]
    again.finish()
    assert claims.count_open(folder) == 1
    assert list(claims.taken(folder)) == []
    claims.wipe(folder)
    assert claims.take(folder, Holder("12_4", 0, "node2-5")) is None


def test_a_taken_bunch_is_given_back_once(folder: TaskFolder) -> None:
    claims.offer(folder, 0, [1])
    bunch = claims.take(folder, Holder("1", 0, "a"))
    assert bunch is not None
    claims.give_back(folder, bunch.path)
    claims.give_back(folder, bunch.path)
    assert [path.name for path in folder.open.iterdir()] == ["000000-1.bunch"]


def test_bunches_that_are_moved_while_they_are_read_are_found_where_they_are_then(
    folder: TaskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        claims.offer(folder, number, [number, number + 10])

    def read(path: Path) -> bytes:
        if path.parent == folder.open:  # a job takes whatever somebody looks at
            claims.take(folder, Holder("7", 0, "a"))
        return whole(path)

    whole = Path.read_bytes
    monkeypatch.setattr(Path, "read_bytes", read)
    assert claims.covered(folder) == {0, 1, 2, 3, 10, 11, 12, 13}


def test_a_folder_that_lists_what_is_not_there_is_not_looked_at_for_ever(
    folder: TaskFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder.open / "000001-0.bunch").symlink_to(folder.open / "nothing")
    monkeypatch.setattr(claims, "_LATEST_S", 0.01)
    with pytest.raises(WorkerFailed, match="lists bunches that are not there"):
        claims.covered(folder)

"""A room in shared memory: one for a run, gone when nobody has it open any more."""

import os
from pathlib import Path

import pytest

from shoal.comm.shm import kept
from shoal.comm.shm.kept import open_room, remove_room, token_of
from shoal.comm.shm.sweeper import Sweeper
from shoal.data.stage.copies import folder_of

_TIMEOUT_S = 60.0


class Store:
    """A store of one process."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}

    def compare_set(self, key: str, _: str, value: str) -> bytes:
        """Set a value unless there is one; return what is there."""
        return self.values.setdefault(key, value.encode())


def test_all_workers_of_a_run_have_one_token_and_one_room(tmp_path: Path) -> None:
    store = Store()
    first, second = (open_room(token_of(store), shared=tmp_path) for _ in range(2))
    assert (first.path, first.id) == (second.path, second.id)
    assert open_room(token_of(Store()), shared=tmp_path).id != first.id
    assert first.path.stat().st_mode & 0o777 == 0o700
    assert first.free_bytes() > 0


def test_a_room_lasts_as_long_as_anybody_has_it_open_and_the_next_run_removes_it(tmp_path: Path) -> None:
    first, second = (open_room("dead", shared=tmp_path) for _ in range(2))
    first.close()
    open_room("other", shared=tmp_path).close()
    assert first.path.exists()
    second.close()
    open_room("other", shared=tmp_path).close()
    assert not first.path.exists()
    remove_room("other", shared=tmp_path)
    assert list(tmp_path.iterdir()) == []
    remove_room("other", shared=tmp_path)


def test_copies_of_packs_in_memory_are_none_of_a_runs(tmp_path: Path) -> None:
    copy = folder_of(tmp_path, "corpus.pack")
    copy.mkdir(parents=True)
    (copy / "part").write_bytes(b"of another run, or of `shoal stage`")
    open_room("token", shared=tmp_path).close()
    assert sorted(path.name for path in copy.parent.rglob("*")) == ["corpus.pack", "part"]


def test_somebody_elses_folder_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"shoal-room-{os.geteuid()}-token").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="belongs to somebody else"):
        open_room("token", shared=tmp_path)


def test_who_sweeps_ends_when_the_room_is_removed(tmp_path: Path) -> None:
    room = open_room("token", shared=tmp_path)
    sweeper = Sweeper(room.path)
    remove_room("token", shared=tmp_path)
    room.close()
    sweeper.leave(timeout_s=_TIMEOUT_S)
    assert sweeper._process.poll() == 0


def test_what_a_container_may_use_is_what_counts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    room = open_room("token", shared=tmp_path)
    monkeypatch.setattr(kept, "_available_bytes", lambda: 123)
    assert room.free_bytes() == 123

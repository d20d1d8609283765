"""Readers of the source are held back: by locked files, by keys of the store, and by what was measured."""

import errno
import fcntl
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from shoal.comm.store import host_store
from shoal.core.errors import ConfigError
from shoal.data.stage.agent import Staging
from shoal.data.stage.origin import FolderOrigin
from shoal.data.stage.staging import stage
from shoal.data.stage.tiers import find_tiers
from shoal.data.stage.turns import FolderTurns, NoTurns, StoreTurns, Turns, next_limit
from tests.data.stage.packs import differing, make_pack
from tests.support.waiting import wait_until

TIMEOUT_S = 30.0


def settled(rate: Callable[[int], float]) -> int:
    """Return how many readers there are in the end, where so many together get `rate`."""
    limit, rates = 1, dict[int, float]()
    for _ in range(100):
        rates[limit] = rate(limit)
        limit = next_limit(limit, rates)
    return limit


def test_one_link_gets_one_reader_and_a_parallel_file_system_as_many_as_it_serves() -> None:
    assert settled(lambda count: 118e6) == 1
    assert settled(lambda count: min(count, 5) * 1e9) == 5
    assert settled(lambda count: count * 1e9) == 64
    assert settled(lambda count: 1e9 / count) == 1
    assert next_limit(3, {}) == 3


def folder_turns(tmp_path: Path) -> Callable[[str], Turns]:
    return lambda me: FolderTurns(tmp_path / ".readers")


def store_turns(tmp_path: Path) -> Callable[[str], Turns]:
    store, _ = host_store(host="127.0.0.1", timeout_s=TIMEOUT_S)
    return lambda me: StoreTurns(store, "a", me=me, silent_s=0.2)


@pytest.fixture(params=[folder_turns, store_turns])
def turns(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Turns]:
    made: Callable[[str], Turns] = request.param(tmp_path)
    return made


def test_one_reads_at_a_time_until_two_are_worth_it(turns: Callable[[str], Turns]) -> None:
    first, second = turns("1"), turns("2")
    with first.take(timeout_s=TIMEOUT_S) as turn:
        assert turn.number == 0
        with second.take(timeout_s=0.01) as none:
            assert none.number == -1  # waited long enough: reads without one
        turn.bytes_per_s = 100.0
    with first.take(timeout_s=TIMEOUT_S) as one, second.take(timeout_s=TIMEOUT_S) as other:
        assert sorted([one.number, other.number]) == [0, 1]
        other.bytes_per_s = 50.0  # each got half: the two are not worth it
    with first.take(timeout_s=TIMEOUT_S), second.take(timeout_s=0.01) as none:
        assert none.number == -1


def test_what_was_measured_with_another_number_of_readers_is_not_taken_for_that_of_now(
    turns: Callable[[str], Turns],
) -> None:
    first, second, third = turns("1"), turns("2"), turns("3")
    with first.take(timeout_s=TIMEOUT_S) as turn:
        turn.bytes_per_s = 100.0
    with ExitStack() as begun:
        one = begun.enter_context(first.take(timeout_s=TIMEOUT_S))
        with second.take(timeout_s=TIMEOUT_S) as other:
            other.bytes_per_s = 50.0  # not worth it: there is one turn from now on
        one.bytes_per_s = 50.0  # of two, which is not the rate of one
    with third.take(timeout_s=TIMEOUT_S) as alone, second.take(timeout_s=0.01) as none:
        assert none.number == -1
        alone.bytes_per_s = 100.0
    with third.take(timeout_s=TIMEOUT_S), second.take(timeout_s=0.01) as none:
        assert none.number == -1, "two have brought no more than one"


def test_a_turn_is_free_again_after_an_error(turns: Callable[[str], Turns]) -> None:
    with pytest.raises(ZeroDivisionError), turns("1").take(timeout_s=TIMEOUT_S):
        raise ZeroDivisionError
    with turns("2").take(timeout_s=TIMEOUT_S) as turn:
        assert turn.number == 0


def test_who_waits_for_a_turn_is_told_to_end(turns: Callable[[str], Turns]) -> None:
    waiting, ended, taken = turns("2"), threading.Event(), list[int]()

    def take() -> None:
        with waiting.take(timeout_s=600.0, ended=ended) as turn:
            taken.append(turn.number)

    with turns("1").take(timeout_s=TIMEOUT_S):
        thread = threading.Thread(target=take, daemon=True)
        thread.start()
        ended.set()
        thread.join(TIMEOUT_S)
        assert taken == [-1]


def test_a_staging_that_waits_for_its_turn_ends_when_it_is_closed(tmp_path: Path) -> None:
    make_pack(tmp_path / "a.pack")
    with FolderTurns(tmp_path / "a.pack" / ".readers").take(timeout_s=TIMEOUT_S):
        staged = stage(tmp_path / "a.pack", to=tmp_path / "node", desk=tmp_path / "desk")
        assert isinstance(staged, Staging)
        wait_until(lambda: staged._fetcher is not None)
        staged.close()
        assert not staged._thread.is_alive()
    assert staged.have() == []


def test_the_turn_of_a_silent_reader_is_taken_and_that_of_a_slow_one_is_not(tmp_path: Path) -> None:
    made = store_turns(tmp_path)
    with made("silent").take(timeout_s=TIMEOUT_S), made("next").take(timeout_s=TIMEOUT_S) as turn:
        assert turn.number == 0
    ended = threading.Event()
    with made("slow").take(timeout_s=TIMEOUT_S) as slow:
        slow._last_s = 0.0  # type: ignore[attr-defined]

        def beat() -> None:
            while not ended.wait(0.02):
                slow._last_s = 0.0  # type: ignore[attr-defined]
                slow.beat()

        thread = threading.Thread(target=beat)
        thread.start()
        with made("next").take(timeout_s=0.6) as turn:
            assert turn.number == -1
        ended.set()
        thread.join(TIMEOUT_S)


def test_files_of_turns_are_removed_when_nobody_reads(tmp_path: Path) -> None:
    first, second = FolderTurns(tmp_path / ".readers"), FolderTurns(tmp_path / ".readers")
    with first.take(timeout_s=TIMEOUT_S):
        second.close()
        assert (tmp_path / ".readers").exists()
    first.close()
    assert not (tmp_path / ".readers").exists()
    with NoTurns().take(timeout_s=0) as turn:
        assert turn.number == 0


def _without_locks(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have no locks on files in `folder`, as Lustre has none unless it is mounted with them."""
    real = fcntl.flock

    def flock(handle: int, operation: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().is_relative_to(folder):
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
        real(handle, operation)

    monkeypatch.setattr("shoal.data.stage.locks.fcntl.flock", flock)


def test_a_source_whose_file_system_has_no_locks_is_read_without_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pack(tmp_path / "a.pack")
    _without_locks(monkeypatch, tmp_path / "a.pack")
    with FolderTurns(tmp_path / "a.pack" / ".readers").take(timeout_s=TIMEOUT_S) as turn:
        assert turn.number == -1
        turn.bytes_per_s = 100.0
    with stage(tmp_path / "a.pack", to=tmp_path / "node", desk=tmp_path / "desk") as staged:
        staged.wait(timeout_s=TIMEOUT_S)
        assert differing(staged.path, tmp_path / "a.pack") == []


def test_storage_without_locks_is_no_place_for_a_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pack(tmp_path / "a.pack")
    _without_locks(monkeypatch, tmp_path / "node")
    with pytest.raises(ConfigError, match="its file system has no locks"):
        stage(tmp_path / "a.pack", to=tmp_path / "node", desk=tmp_path / "desk")
    monkeypatch.setattr("shoal.data.stage.tiers.places", lambda: {tmp_path / "node": "local"})
    assert find_tiers(seconds=0.01) == []


_OF_ANOTHER_USER = """
import os, sys, warnings
from pathlib import Path
from shoal.data.stage.staging import stage
from shoal.data.stage.tiers import find_tiers
from shoal.data.stage.turns import FolderTurns
warnings.simplefilter("error")
source, home = map(Path, sys.argv[1:])
os.setresuid(65534, 65534, 65534)
with FolderTurns(source / ".readers").take(timeout_s=30) as turn:
    print("turn", turn.number)
with stage(source, to=home / "to", desk=home / "desk") as staged:
    staged.wait(timeout_s=30)
    print("parts", len(staged.have()))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which root alone can")
@pytest.mark.parametrize("left_behind", ["0.lock", "of nobody's business", None])
def test_a_pack_that_another_user_has_staged_can_be_staged(left_behind: str | None) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to others
        folder, home = Path(name), Path(name, "home")
        folder.chmod(0o755)
        make_pack(folder / "a.pack")
        home.mkdir()
        os.chown(home, 65534, 65534)
        if left_behind is not None:
            (folder / "a.pack" / ".readers").mkdir()
            (folder / "a.pack" / ".readers" / left_behind).touch(mode=0o644)
        command = [sys.executable, "-c", _OF_ANOTHER_USER, str(folder / "a.pack"), str(home)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        wanted = 0 if left_behind == "0.lock" else -1
        assert done.stdout.splitlines() == [f"turn {wanted}", "parts 4"]


def test_rates_that_make_no_sense_count_as_none(tmp_path: Path) -> None:
    folder = tmp_path / ".readers"
    folder.mkdir()
    for written in ("[]", "{}", '{"limit": "many", "rates": {}}', '{"limit": 0, "rates": {"one": []}}', "no json"):
        (folder / "rates.json").write_text(written)
        with FolderTurns(folder).take(timeout_s=TIMEOUT_S) as turn:
            assert turn.number == 0
            turn.bytes_per_s = 100.0


def test_nodes_that_cannot_reach_each_other_read_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pack(tmp_path / "a.pack", part_bytes=1_000_000)
    monkeypatch.setattr("shoal.data.stage.turns.next_limit", lambda limit, rates: 1)
    lock, readers, most = threading.Lock(), 0, 0

    class Counted(FolderOrigin):
        def open(self, name: str) -> Any:
            opened = super().open(name)

            class Both:
                def __enter__(self) -> Any:
                    nonlocal readers, most
                    with lock:
                        readers += name != "manifest.json"
                        most = max(most, readers)
                    return opened.__enter__()

                def __exit__(self, *error: Any) -> None:
                    nonlocal readers
                    with lock:
                        readers -= name != "manifest.json"
                    opened.__exit__(*error)

            return Both()

    monkeypatch.setattr("shoal.data.stage.origin.FolderOrigin", Counted)
    with ExitStack() as opened:
        homes = [tmp_path / f"node{index}" for index in range(4)]
        nodes = [opened.enter_context(stage(tmp_path / "a.pack", to=home, desk=home / "desk")) for home in homes]
        for node in nodes:
            node.wait(timeout_s=TIMEOUT_S)
            assert differing(node.path, tmp_path / "a.pack") == []
    assert most == 1
    assert not (tmp_path / "a.pack" / ".readers").exists()

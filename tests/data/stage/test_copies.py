"""One copy a node: shared, taken over from a killed leader, removed with its last owner, cleaned after a crash."""

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, DataError
from shoal.data.pack.manifest import NAME
from shoal.data.stage.agent import Staging
from shoal.data.stage.copies import Desk, is_owned, read_plan
from shoal.data.stage.keeper import start_keeper
from shoal.data.stage.locks import FileLock
from shoal.data.stage.staged import Staged
from shoal.data.stage.staging import stage
from shoal.data.stage.status import release, staged_here
from shoal.data.stage.tiers import Tier
from tests.data.stage.file_server import serving
from tests.data.stage.packs import differing, make_pack

TIMEOUT_S = 60.0


class Worker:
    """A process of tests/data/stage/stage_worker.py."""

    def __init__(self, pack: str, folder: Path, desk: Path) -> None:
        command = [sys.executable, "-m", "tests.data.stage.stage_worker", pack, str(folder), str(desk)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        said = self._line()
        self.path, self.sweeper = Path(said["path"]), said["sweeper"]

    def ask(self, what: str = "report") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{what}\n")
        self.process.stdin.flush()
        return self._line()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=TIMEOUT_S)

    def leave(self) -> None:
        self.process.communicate(timeout=TIMEOUT_S)
        assert self.process.returncode == 0

    def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Worker]]:
    workers: list[Worker] = []

    def started(pack: str) -> Worker:
        workers.append(Worker(pack, tmp_path / "fast", tmp_path / "desk"))
        return workers[-1]

    yield started
    for worker in workers:
        with suppress(ValueError):
            worker.kill()


def _runs(pid: int) -> bool:
    """Return whether a process is there that is not about to be forgotten."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(holds: Callable[[], bool]) -> None:
    """Return when it holds."""
    for _ in range(int(TIMEOUT_S / 0.01)):
        if holds():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it never held")


def test_a_pack_is_copied_and_is_a_pack_from_the_first_moment_and_gone_at_the_end(tmp_path: Path) -> None:
    make_pack(tmp_path / "a.pack")
    with stage(tmp_path / "a.pack", to=tmp_path / "fast", desk=tmp_path / "desk") as staged:
        assert (staged.path / NAME).read_bytes() == (tmp_path / "a.pack" / NAME).read_bytes()
        assert staged.locate(3, "parts/00003.arrow").read_bytes()
        staged.wait(timeout_s=TIMEOUT_S)
        assert differing(staged.path, tmp_path / "a.pack") == []
        assert staged.have() == [0, 1, 2, 3]
        assert is_owned(staged.path)
        seen = pickle.loads(pickle.dumps(staged))
        assert type(seen) is Staged
        assert seen.path_of(2) == staged.path
    assert not staged.path.exists()
    assert Desk(tmp_path / "desk").copies() == []
    assert sorted(path.name for path in (tmp_path / "a.pack").iterdir()) == [NAME, "parts"]


def test_parts_come_in_the_order_in_which_they_are_wanted(tmp_path: Path) -> None:
    make_pack(tmp_path / "a.pack")
    with stage(tmp_path / "a.pack", to=tmp_path / "fast", desk=tmp_path / "desk", parts=[2, 0, 2]) as staged:
        plan = read_plan(staged.path)
        assert plan is not None
        assert plan["parts"] == [2, 0, 1, 3]


def test_what_does_not_fit_is_read_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_pack(tmp_path / "a.pack")
    monkeypatch.setattr("shoal.data.stage.tiers.room", lambda *_, **__: 250_000)
    with stage(tmp_path / "a.pack", to=tmp_path / "fast", desk=tmp_path / "desk", parts=[3, 1, 0]) as staged:
        assert staged.path_of(1) == staged.path
        assert staged.path_of(0) == staged.path_of(2) == tmp_path / "a.pack"
        staged.wait(timeout_s=TIMEOUT_S)
        assert staged.have() == [1, 3]
        assert "room for 2 of 3 parts; the others are read in place" in staged.reason


def test_a_disk_that_fills_up_half_way_leaves_the_rest_to_be_read_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_pack(tmp_path / "a.pack")
    calls = []

    def full(handle: int, begin: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with stage(tmp_path / "a.pack", to=tmp_path / "fast", desk=tmp_path / "desk") as staged:
        folders = [staged.path_of(part) for part in range(4)]
        assert folders == [staged.path, staged.path, tmp_path / "a.pack", tmp_path / "a.pack"]
        assert list((staged.path / "parts").glob("*.partial")) == []
        staged.wait(timeout_s=TIMEOUT_S)


def test_workers_of_a_node_share_one_copy_and_another_one_takes_over_from_a_killed_leader(
    tmp_path: Path, start: Callable[[str], Worker]
) -> None:
    make_pack(tmp_path / "source" / "a.pack", part_bytes=2_000_000)
    with serving(tmp_path / "source") as server:
        gate = server.gates.setdefault("a.pack/parts/00001.arrow", threading.Event())
        first, second = start(f"{server.url}/a.pack"), start(f"{server.url}/a.pack")
        assert first.path == second.path
        assert server.reached.wait(TIMEOUT_S)
        assert (first.ask()["is_leader"], second.ask()["is_leader"]) == (True, False)
        first.kill()
        gate.set()
        assert second.ask("wait")["have"] == [0, 1, 2, 3]
        assert second.ask()["is_leader"]
        assert differing(second.path, tmp_path / "source" / "a.pack") == []
        assert server.read_bytes["a.pack/parts/00000.arrow"] == 2_000_001  # what was whole was not read again
    second.leave()
    assert not second.path.exists()


def test_what_a_killed_worker_leaves_is_given_back_at_once_and_what_another_one_uses_is_not(
    tmp_path: Path, start: Callable[[str], Worker]
) -> None:
    make_pack(tmp_path / "a.pack")
    make_pack(tmp_path / "b.pack", seed=1)
    killed, living = start(str(tmp_path / "a.pack")), start(str(tmp_path / "b.pack"))
    second = start(str(tmp_path / "b.pack"))
    killed.ask("wait")
    killed.kill()
    until(lambda: not killed.path.exists())
    living.kill()
    assert second.ask("wait")["have"] == [0, 1, 2, 3]
    assert second.path.exists()
    second.kill()
    until(lambda: not second.path.exists())


def test_what_a_host_that_went_down_has_left_is_removed_by_the_next_one_and_not_before(
    tmp_path: Path, start: Callable[[str], Worker]
) -> None:
    make_pack(tmp_path / "a.pack")
    make_pack(tmp_path / "b.pack", seed=1)
    desk = Desk(tmp_path / "desk")
    killed, living = start(str(tmp_path / "a.pack")), start(str(tmp_path / "b.pack"))
    killed.ask("wait")
    assert desk.clean() == []
    os.kill(killed.sweeper, signal.SIGKILL)
    until(lambda: not _runs(killed.sweeper))
    killed.kill()
    assert killed.path.exists()
    assert [(copy["is_used"], len(copy["has"])) for copy in staged_here(desk, tmp_path / "a.pack")] == [(False, 4)]
    with stage(tmp_path / "b.pack", to=tmp_path / "fast", desk=tmp_path / "desk") as shared:
        assert not killed.path.exists()
        assert shared.path == living.path
    assert living.path.exists()
    assert living.ask("wait")["have"] == [0, 1, 2, 3]


def test_a_keeper_owns_the_copy_until_the_process_it_watches_ends(tmp_path: Path) -> None:
    make_pack(tmp_path / "a.pack")
    watched = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    staged = stage(tmp_path / "a.pack", to=tmp_path / "fast", desk=tmp_path / "desk")
    assert isinstance(staged, Staging)
    staged.wait(timeout_s=TIMEOUT_S)
    start_keeper(staged.hand_over(), staged.path, until_pid=watched.pid)
    assert Desk(tmp_path / "desk").clean() == []
    watched.communicate(timeout=TIMEOUT_S)
    until(lambda: not staged.path.exists())


def test_a_kept_copy_is_given_back_when_asked_but_not_from_under_another_user(tmp_path: Path) -> None:
    make_pack(tmp_path / "a.pack")
    desk = Desk(tmp_path / "desk")
    staged = stage(tmp_path / "a.pack", to=tmp_path / "fast", desk=desk.path)
    assert isinstance(staged, Staging)
    start_keeper(staged.hand_over(), staged.path, until_pid=os.getpid())
    with stage(tmp_path / "a.pack", to=tmp_path / "fast", desk=desk.path) as other:
        assert other.path == staged.path
        assert release(desk, tmp_path / "a.pack", timeout_s=1.5) == ([], [staged.path])
        assert other.path_of(0) == staged.path
    until(lambda: not staged.path.exists())
    assert release(desk, tmp_path / "a.pack", timeout_s=1) == ([], [])


def test_a_forked_child_holds_no_lock_of_its_parent(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    assert lock.take()
    child = os.fork()
    if child == 0:
        os._exit(0 if not lock.take() else 1)  # not held any more, and not to be had
    assert os.waitpid(child, 0)[1] == 0
    assert not FileLock(tmp_path / "lock").take()


def test_automatic_staging_leaves_a_pack_where_no_storage_is_faster_and_says_so(tmp_path: Path) -> None:
    make_pack(tmp_path / "a.pack")
    slow = Tier("local", Path("/proc"), 1.0, 10**12)
    with stage(tmp_path / "a.pack", tiers=[slow], desk=tmp_path / "desk") as staged:
        assert staged.path == tmp_path / "a.pack"
        assert staged.reason.startswith("read in place at ")
        assert [staged.path_of(part) for part in range(4)] == 4 * [tmp_path / "a.pack"]
        staged.wait()
    assert (tmp_path / "a.pack" / "parts" / "00000.arrow").exists()


def test_automatic_staging_measures_and_finds_the_copy_again(tmp_path: Path) -> None:
    make_pack(tmp_path / "a.pack")
    fast = Tier("memory", Path("/dev/shm"), 1e15, 10**12)
    if fast.path.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("temporary files are in memory here")
    with stage(tmp_path / "a.pack", tiers=[fast], desk=tmp_path / "desk") as staged:
        assert Path("/dev/shm") in staged.path.parents
        with stage(tmp_path / "a.pack", desk=tmp_path / "desk") as again:
            assert again.path == staged.path
            assert again.reason.endswith("is here already.")
    assert not staged.path.exists()


@pytest.mark.parametrize(
    ("pack", "options", "words"),
    [
        ("nowhere", {}, "no manifest.json"),
        ("a.pack", {"parts": [1, 9]}, "part 9 was asked for, but .* has parts 0 to 3"),
        ("a.pack", {"to": "/proc/nowhere"}, "--to /proc/nowhere: no folder can be made there"),
        ("a.pack", {"to": "project", "tiers": []}, "--to project: this node has no such storage"),
    ],
)
def test_a_mistake_is_one_sentence(tmp_path: Path, pack: str, options: dict[str, Any], words: str) -> None:
    make_pack(tmp_path / "a.pack")
    with pytest.raises((ConfigError, DataError), match=words):
        stage(tmp_path / pack, desk=tmp_path / "desk", **options)

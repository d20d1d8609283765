"""Lost workers are replaced: the launcher's side, with programs that only play workers."""

import errno
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.comm.rank import MEMBER
from shoal.comm.shm import kept
from shoal.core.errors import WorkerFailed
from shoal.core.run_folder import RunFolder
from shoal.launch.local import Watch, Worker, launch_local
from shoal.launch.starting import Process, Spawning
from shoal.spec.on_loss import OnLoss
from tests.launch.test_local import ENDED
from tests.support.waiting import wait_until

MEETING = """
import os, signal, sys, time
import torch.distributed as dist
member = os.environ["SHOAL_MEMBER"]
print(member, flush=True)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), wait_for_workers=False)
members = dist.PrefixStore("members", store)
"""
ASKING = """
from pathlib import Path
from shoal.core.run_folder import RunFolder
from shoal.launch import wishes
ask = lambda path, workers: wishes.ask(RunFolder(Path(path)), workers)
"""


class Refused(Spawning):
    """Starts each process by a command, but the member `refused`: for that the system has no room."""

    refused = ""

    def start(self, env: dict[str, str], in_vain: Callable[[], bool]) -> Process:
        if env[MEMBER] == self.refused:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        return super().start(env, in_vain)


def launch(
    code: str, *, workers: int = 2, restarts: int = 1, refused: str = "", folder: RunFolder | None = None
) -> tuple[list[Worker], list[str], list[str]]:
    """Run `code` as the workers; return how they ended, what they printed, and what the launcher said."""
    lines: list[str] = []
    notes: list[str] = []
    watch = Watch(on_line=lambda _, line: lines.append(line), on_note=notes.append)
    command = Refused([sys.executable, "-c", code])
    command.refused = refused
    on_loss = OnLoss(restarts=restarts)
    ended = launch_local(command, workers=workers, timeout_s=60, watch=watch, on_loss=on_loss, folder=folder)
    return ended, lines, notes


def test_a_worker_that_is_killed_is_started_again_and_the_others_are_told() -> None:
    code = """
if member == "1.0":
    os.kill(os.getpid(), signal.SIGKILL)
if member == "0.0":
    members.wait(["dead 1.0", "up"])
    print("told:", members.get("dead 1.0").decode(), flush=True)
members.set("up", "1")
members.set("finished", "1")
members.set(f"done {member}", "1")
"""
    ended, lines, notes = launch(MEETING + code)
    assert [worker.member for worker in ended] == ["0.0", "1.1"]
    assert all(worker.is_done and worker.exit_code == 0 for worker in ended)
    assert {"0.0", "1.0", "1.1"} <= set(lines)
    assert any("was killed by SIGKILL" in line for line in lines if line.startswith("told:"))
    assert len(notes) == 1
    assert notes[0].endswith("was killed by SIGKILL; the others go on, and another is started in its place.")


def test_one_that_was_started_often_enough_is_not_started_again() -> None:
    code = """
if member.startswith("1."):
    os.kill(os.getpid(), signal.SIGKILL)
members.wait(["dead 1.0", "dead 1.1"])
members.set("finished", "1")
members.set(f"done {member}", "1")
"""
    ended, _, notes = launch(MEETING + code)
    assert [(worker.member, worker.exit_code, worker.is_lost) for worker in ended] == [
        ("0.0", 0, False),
        ("1.1", -signal.SIGKILL, True),
    ]
    assert all(worker.is_done for worker in ended), "the run has come to its end without it"
    # Which of the two is said depends on whether the other was quicker to come to its end.
    assert notes[-1].endswith(("It was started 2 times, and is not again.", "at the end of the run."))


def test_where_none_can_be_started_in_its_place_the_others_go_on_without_it() -> None:
    code = """
if member == "1.0":
    os.kill(os.getpid(), signal.SIGKILL)
members.wait(["last 1"])
members.set("finished", "1")
members.set(f"done {member}", "1")
"""
    ended, _, notes = launch(MEETING + code, refused="1.1")
    assert [(worker.member, worker.exit_code, worker.is_done) for worker in ended] == [
        ("0.0", 0, True),
        ("1.0", -signal.SIGKILL, True),
    ]
    assert notes[1:] == [
        "worker 1 could not be started: Resource temporarily unavailable. The others go on without it."
    ]


def test_one_that_cannot_be_started_at_first_ends_the_run_in_a_sentence() -> None:
    with pytest.raises(WorkerFailed, match=r"worker 1 could not be started: Resource temporarily unavailable\."):
        launch(MEETING + "time.sleep(60)", refused="1.0")


def test_those_who_cannot_go_on_without_it_are_told_that_none_comes() -> None:
    code = """
if member.startswith("1."):
    os.kill(os.getpid(), signal.SIGKILL)
members.wait(["last 1"])
print("nobody comes after", "1.1" if members.check(["dead 1.1"]) else "1.0", flush=True)
sys.exit(1)
"""
    ended, lines, _ = launch(MEETING + code)
    assert "nobody comes after 1.1" in lines
    assert ended[0].exit_code == 1
    assert not any(worker.is_done for worker in ended)


def test_one_that_the_others_have_given_up_is_ended() -> None:
    code = """
if member == "1.0":
    time.sleep(60)
members.set("dead 1.0", "{}")
if member == "0.0":
    members.wait(["up"])
members.set("up", "1")
members.set("finished", "1")
members.set(f"done {member}", "1")
"""
    ended, _, notes = launch(MEETING + code)
    assert [worker.member for worker in ended] == ["0.0", "1.1"]
    assert "was killed by SIGKILL" in notes[0]


def test_when_nobody_is_left_and_none_may_be_started_the_run_ends() -> None:
    ended, _, notes = launch("import os; os.kill(os.getpid(), 9)", restarts=1)
    assert all(worker.is_lost and not worker.is_done for worker in ended)
    assert len(notes) == 4


def test_a_failure_of_a_worker_itself_ends_the_run() -> None:
    code = "import os, sys, time; sys.exit(2) if os.environ['RANK'] == '1' else time.sleep(60)"
    ended, _, notes = launch(code)
    assert ended[1].exit_code == 2
    assert ended[0].exit_code in ENDED
    assert notes == []


def test_one_that_leaves_before_the_end_of_the_run_ends_it() -> None:
    code = "import os, sys, time; sys.exit(0) if os.environ['RANK'] == '1' else time.sleep(60)"
    ended, _, _ = launch(code)
    assert ended[1].exit_code == 0
    assert ended[0].exit_code in ENDED


def test_who_asks_for_as_many_as_before_gets_one_that_was_started_often_enough_and_more_if_wanted(
    tmp_path: Path,
) -> None:
    folder = RunFolder.create(tmp_path, "run", "run")
    code = f"""
if member == "1.0":
    os.kill(os.getpid(), signal.SIGKILL)
if member == "0.0":
    members.wait(["last 1"])
    ask({str(folder.path)!r}, 3)
    members.wait(["up 1.1", "up 2.0"])
    print("last:", members.check(["last 1"]), members.get("numbers").decode(), flush=True)
    members.set("go", "1")
members.set(f"up {{member}}", "1")
members.wait(["go"])
print(member, os.environ["RANK"], os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"], flush=True)
members.set("finished", "1")
members.set(f"done {{member}}", "1")
"""
    ended, lines, notes = launch(MEETING + ASKING + code, restarts=0, folder=folder)
    assert [(worker.rank, worker.member, worker.is_done) for worker in ended] == [
        (0, "0.0", True),
        (1, "1.1", True),
        (2, "2.0", True),
    ]
    assert {"last: False 3", "1.1 1 1 2", "2.0 2 2 2"} <= set(lines)
    assert notes[-1] == "workers 1, 2 are added: the run was asked for 3 workers (shoal scale)."


def test_those_that_are_ended_are_told_of_and_nobody_takes_their_place_until_more_are_asked_for(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "run", "run")
    code = f"""
if member == "0.0":
    members.wait(["up 1.0", "up 2.0"])
    ask({str(folder.path)!r}, 1)
    members.wait(["last 1", "last 2"])
    print(members.get("dead 2.0").decode(), flush=True)
    ask({str(folder.path)!r}, 2)
    members.wait(["up 1.1"])
    members.set("go", "1")
members.set(f"up {{member}}", "1")
members.wait(["go"])
members.set("finished", "1")
members.set(f"done {{member}}", "1")
"""
    ended, lines, notes = launch(MEETING + ASKING + code, workers=3, folder=folder)
    assert [(worker.member, worker.is_lost, worker.is_done) for worker in ended] == [
        ("0.0", False, True),
        ("1.1", False, True),
        ("2.0", True, True),
    ]
    assert any("was ended, for the run was asked for 1 worker (shoal scale)" in line for line in lines)
    assert notes == [
        "workers 1, 2 are ended: the run was asked for 1 worker (shoal scale).",
        "worker 1 is added: the run was asked for 2 workers (shoal scale).",
    ]


def test_what_a_lost_worker_had_started_is_ended_and_memory_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept, "token_of", lambda _: "of-this-test")
    room = kept.SHARED / f"shoal-room-{os.geteuid()}-of-this-test"
    code = f"""
import os, subprocess
assert os.path.isdir({str(room)!r})
child = subprocess.Popen(["sleep", "300"])
open({str(tmp_path)!r} + "/" + os.environ["SHOAL_MEMBER"], "w").write(str(child.pid))
os.kill(os.getpid(), 9)
"""
    launch(code, workers=1)
    pids = [path.read_text() for path in tmp_path.iterdir()]
    assert len(pids) == 2
    wait_until(lambda: not any(map(is_running, pids)), seconds=10)  # a kill takes effect when the system comes to it
    assert not room.exists()


def is_running(pid: str) -> bool:
    """Return whether the process runs: one that has ended may still be listed, as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False

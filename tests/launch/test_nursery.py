"""The nursery: what is forked from it is a process of its own, tied to it, and its end is told."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal.core.errors import WorkerFailed
from shoal.core.notice import SIGNALS
from shoal.launch import nursery as nursery_module
from shoal.launch.local import Watch, launch_local
from shoal.launch.nursery import Forked, Nursery, await_early, can_fork, early
from shoal.launch.starting import Vain
from tests.launch.test_local import is_alive
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(not can_fork(), reason="workers are forked on Linux only")

PROGRAM = """
import argparse, os, socket, sys
from shoal.core.notice import leave_to_others
from shoal.launch.forking import serve
from shoal.launch.parent import die_with_parent
parser = argparse.ArgumentParser()
parser.add_argument("--control", type=int)
parser.add_argument("--parent", type=int)
arguments = parser.parse_args()
die_with_parent(arguments.parent)
leave_to_others()
forked = serve(socket.socket(fileno=arguments.control))
if forked is not None:
    die_with_parent(int(forked[-1]))
    exec(forked[0])
"""
"""A nursery that has imported nothing, and whose children run a program."""
REFUSED = """
import errno, os
from shoal.launch import forking
calls, call = [], os.{name}
def refused(*arguments):
    calls.append(arguments)
    if len(calls) <= {times}:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return call(*arguments)
os.{name} = refused
forking._REFUSED_S = {patience_s}
"""
"""What a nursery begins with whose system refuses a call a few times."""
SLEEP = "import time; time.sleep(60)"
FACTS = """
import json, threading
print(json.dumps({"pid": os.getpid(), "session": os.getsid(0), "parent": os.getppid(), "variable": os.environ["RANK"],
    "shared": os.environ["SHARED"], "arguments": sys.argv[1:], "threads": threading.active_count(),
    "descriptors": sorted(os.listdir("/proc/self/fd"))}))
print("on stderr", file=sys.stderr)
sys.exit(7)
"""


@contextmanager
def nursery(program: str, *, begins: str = "") -> Iterator[Nursery]:
    """Have a nursery whose children run `program`, and that itself `begins` with another."""
    one = Nursery([program], command=[sys.executable, "-c", begins + PROGRAM])
    one.open({**os.environ, "SHARED": "by all", "PYTHONUNBUFFERED": "1"})
    try:
        yield one
    finally:
        one.close()


def start(one: Nursery, rank: int = 0) -> Forked:
    return one.start({"RANK": str(rank)}, lambda: False)


def process_of(one: Nursery) -> "subprocess.Popen[bytes]":
    assert one._importing is not None
    return one._importing.process


def code_of(process: Forked) -> int:
    wait_until(lambda: process.poll() is not None)
    code = process.poll()
    assert code is not None
    return code


def said_by(process: Forked) -> str:
    assert process.stdout is not None
    with process.stdout as pipe:
        return pipe.read().decode()


def test_a_forked_process_is_one_of_its_own() -> None:
    with nursery(FACTS) as one:
        processes = [start(one, rank) for rank in range(3)]
        assert [code_of(process) for process in processes] == [7, 7, 7]
        for rank, process in enumerate(processes):
            facts, also = said_by(process).splitlines()
            told = json.loads(facts)
            assert told["pid"] == told["session"] == process.pid
            assert (told["variable"], told["shared"]) == (str(rank), "by all")
            assert told["arguments"] == [FACTS, "--parent", str(told["parent"])]
            assert told["threads"] == 1
            assert told["descriptors"] == ["0", "1", "2", "3"]  # 3 is the folder that it lists: nothing of the others
            assert also == "on stderr"


def test_ends_are_told_by_signal_and_code_and_wake_whoever_watches() -> None:
    import select

    with nursery(SLEEP) as one:
        first, second = start(one), start(one)
        end = first.open_end()
        assert select.select([end], [], [], 0.0)[0] == []
        first.kill()
        assert select.select([end], [], [], 10.0)[0] == [end]
        assert code_of(first) == -signal.SIGKILL
        assert second.poll() is None
        second.send_signal(signal.SIGTERM)
        assert code_of(second) == -signal.SIGTERM
        first.send_signal(signal.SIGTERM)  # it has ended: nothing is sent to whoever has its number now
        with pytest.raises(OSError, match="ended already"):
            first.open_end()
        os.close(end)
        for process in (first, second):
            said_by(process)


def test_workers_die_with_the_nursery_and_it_with_the_launcher() -> None:
    with nursery(SLEEP) as one:
        process = start(one)
        process_of(one).kill()
        assert code_of(process) == -signal.SIGKILL
        wait_until(lambda: not is_alive(process.pid))
        said_by(process)
        with pytest.raises(WorkerFailed, match="has ended"):
            start(one)


@pytest.mark.parametrize("name", ["fork", "pidfd_open"])
def test_what_the_system_refuses_for_a_moment_is_asked_for_again(name: str) -> None:
    with nursery("sys.exit(7)", begins=REFUSED.format(name=name, times=3, patience_s=60)) as one:
        process = start(one)
        assert code_of(process) == 7
        said_by(process)


@pytest.mark.parametrize("name", ["fork", "pidfd_open"])
def test_one_that_cannot_be_started_is_told_and_the_nursery_goes_on(name: str) -> None:
    with nursery("sys.exit(7)", begins=REFUSED.format(name=name, times=1, patience_s=0)) as one:
        with pytest.raises(BlockingIOError, match="Resource temporarily unavailable"):
            start(one)
        children = Path(f"/proc/{process_of(one).pid}/task/{process_of(one).pid}/children")
        assert children.read_text() == ""
        process = start(one)
        assert code_of(process) == 7
        said_by(process)


@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_request_to_stop_that_reaches_all_processes_is_the_workers_and_not_the_nurserys(number: int) -> None:
    with nursery(SLEEP) as one:
        first, second = start(one), start(one)
        for pid in (process_of(one).pid, first.pid):  # as Slurm does to all of a step
            os.kill(pid, number)
        assert code_of(first) == -number
        assert second.poll() is None, "the nursery goes on, and so does who was not asked"
        second.kill()
        assert code_of(second) == -signal.SIGKILL
        for process in (first, second):
            said_by(process)


def test_a_request_to_stop_in_the_moment_of_the_start_is_not_lost() -> None:
    with nursery(SLEEP) as one:
        for _ in range(20):
            process = start(one)
            process.send_signal(signal.SIGTERM)
            assert code_of(process) == -signal.SIGTERM
            said_by(process)


def test_one_that_was_begun_early_is_taken_by_the_first_that_can_use_it() -> None:
    command, env = [sys.executable, "-c", PROGRAM], {**os.environ, "PYTHONUNBUFFERED": "1"}
    with early(command, env):
        await_early()
        pid = nursery_module._EARLY[0].process.pid
        with nursery(FACTS) as one:  # with a variable more
            assert process_of(one).pid == pid
            process = start(one)
            assert code_of(process) == 7
            facts = json.loads(said_by(process).splitlines()[0])
            assert (facts["parent"], facts["shared"], facts["variable"]) == (pid, "by all", "0")
        with nursery(FACTS) as other:
            assert process_of(other).pid != pid
    assert not is_alive(pid)


@pytest.mark.parametrize("change", [{"SHARED": "by nobody"}, {"OMP_NUM_THREADS": "7"}])
def test_one_that_was_begun_early_is_left_where_it_is_another_and_ended(change: dict[str, str]) -> None:
    with early([sys.executable, "-c", PROGRAM], {**os.environ, **change}):
        pid = nursery_module._EARLY[0].process.pid
        with nursery(SLEEP) as one:
            assert process_of(one).pid != pid
        assert is_alive(pid)
    assert not is_alive(pid)


def test_what_a_nursery_said_before_it_failed_is_told() -> None:
    one = Nursery([SLEEP], command=[sys.executable, "-c", "raise ImportError('no torch here')"])
    one.open(dict(os.environ))
    try:
        with pytest.raises(WorkerFailed) as caught:
            start(one)
        assert "no torch here" in caught.value.details
    finally:
        one.close()


def test_nobody_waits_for_a_start_in_vain() -> None:
    one = Nursery([SLEEP], command=[sys.executable, "-c", SLEEP])
    one.open(dict(os.environ))
    begin_s = time.monotonic()
    with pytest.raises(Vain):
        one.start({}, lambda: True)
    process_of(one).kill()  # or closing would wait for it
    one.close()
    assert time.monotonic() - begin_s < 5.0


def test_the_real_one_has_a_single_thread_and_leaves_nothing(tmp_path: Path) -> None:
    class Spied(Nursery):
        def close(self) -> None:
            pid = process_of(self).pid
            found.append(len(list(Path(f"/proc/{pid}/task").iterdir())))
            super().close()
            found.append(is_alive(pid))

    found: list[int] = []
    lines: list[str] = []
    starting = Spied(["worker", str(tmp_path / "no run")])
    watch = Watch(on_line=lambda _, line: lines.append(line))
    workers = launch_local(starting, workers=2, timeout_s=60, watch=watch)
    assert {worker.exit_code for worker in workers} <= {2, -signal.SIGHUP}  # the second may be ended for the first
    assert any("no run" in line for line in lines)
    assert found == [1, False]

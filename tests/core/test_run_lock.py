"""A run is trained by one process at a time: who comes second is told who the first is."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core import run_lock
from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder
from shoal.core.run_lock import held, is_held

_HOLDING = """
import sys
from pathlib import Path
from shoal.core.run_folder import RunFolder
from shoal.core.run_lock import held
with held(RunFolder(Path(sys.argv[1])), job=sys.argv[2]):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(run_lock, "_PATIENCE_S", 0.1)
    return RunFolder(tmp_path)


@pytest.fixture
def other(folder: RunFolder) -> Iterator["subprocess.Popen[str]"]:
    """Another process that trains the run, as job 12 of Slurm."""
    command = [sys.executable, "-c", _HOLDING, str(folder.path), "12"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_who_comes_second_is_told_who_trains_it(folder: RunFolder, other: "subprocess.Popen[str]") -> None:
    assert is_held(folder)
    with (
        pytest.raises(ConfigError, match=rf"is being trained, by process {other.pid} on .*, of job 12\. Wait"),
        held(folder),
    ):
        pass


def test_it_is_free_when_the_first_is_killed(folder: RunFolder, other: "subprocess.Popen[str]") -> None:
    other.send_signal(signal.SIGKILL)
    other.wait(60)
    assert not is_held(folder)
    with held(folder):
        assert is_held(folder)
        assert json.loads(folder.lock.read_text())["process"] == os.getpid()
    assert not is_held(folder)


def test_the_same_job_started_again_goes_on(folder: RunFolder, other: "subprocess.Popen[str]") -> None:
    assert other.poll() is None
    with held(folder, job="12"):
        pass
    with pytest.raises(ConfigError, match="is being trained"), held(folder, job="13"):
        pass


def test_a_forked_child_does_not_keep_it(folder: RunFolder) -> None:
    (up, says_up), (go, says_go) = os.pipe(), os.pipe()
    with held(folder):
        child = os.fork()
        if child == 0:
            os.write(says_up, b"x")
            os.read(go, 1)  # it outlives the block
            os._exit(0)
        os.read(up, 1)
    try:
        assert not is_held(folder)
    finally:
        os.write(says_go, b"x")
        os.waitpid(child, 0)
        for each in (up, says_up, go, says_go):
            os.close(each)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_locks_runs_go_on(number: int, folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refused)
    with held(folder), held(folder):
        assert not is_held(folder)


def test_a_run_that_was_never_trained_is_not_held_and_gets_no_lock(folder: RunFolder) -> None:
    assert not is_held(folder)
    assert not folder.lock.exists()

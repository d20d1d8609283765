"""`shoal watch` in a terminal, in a pipe and as a page, each of a run that grows meanwhile."""

import contextlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.launch.slurm.sbatch import CANCELLED
from tests.report.live_runs import Growing
from tests.support.waiting import wait_until


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    run = Growing(tmp_path)
    run.start()
    run.steps(1, 6)
    return run


@contextlib.contextmanager
def watching(*arguments: str, output: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run `shoal watch` in a process of its own, which writes to `output`, and end it."""
    with output.open("wb") as file:
        command = [sys.executable, "-m", "shoal", "watch", *arguments]
        before = signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # where we ignore it, as under nohup, it would
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        signal.signal(signal.SIGINT, before)
    try:
        yield process
    finally:
        process.kill()
        process.wait(timeout=20)


def test_json_is_one_object_with_how_the_run_stands(growing: Growing, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(growing.folder.path), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert (state["run"], state["step"], state["steps"], state["status"]) == ("gpt-1", 6, 100, "unfinished")
    assert [worker["words"] for worker in state["workers"]] == ["step 6", "step 6"]


def test_once_shows_a_run_that_goes_on_and_ends(growing: Growing, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["watch", str(growing.folder.path), "--once"]) == 0
    shown = capsys.readouterr().out
    assert "step 6 of 100" in shown
    assert "worker 1 ● step 6" in shown


def test_a_run_that_has_ended_is_shown_without_waiting(growing: Growing, capsys: pytest.CaptureFixture[str]) -> None:
    growing.folder.write_result("done")
    assert main(["watch", str(growing.folder.path)]) == 0
    assert "step 6/100  loss 0.6667" in capsys.readouterr().out


def test_a_run_that_failed_before_its_first_step_says_so_in_a_pipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Growing(tmp_path)
    run.folder.write_result("failed", "worker 1:\nno such file")
    assert main(["watch", str(run.folder.path)]) == 0
    assert capsys.readouterr().out == "step 0/100  failed: worker 1: no such file\n"


def test_a_running_run_is_watched_in_plain_lines_until_it_ends(growing: Growing, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    with watching(str(growing.folder.path), output=output) as process:
        wait_until(lambda: "step 6/100" in output.read_text(), seconds=60)
        growing.write(0, "eval", 7, step=7, metrics={"accuracy": 0.5})
        growing.write(1, "checkpoint", 7, step=7, error="the disk is full")
        wait_until(lambda: "the disk is full" in output.read_text(), seconds=60)
        growing.steps(7, 100)
        growing.folder.write_result("done")
        assert process.wait(timeout=60) == 0
    lines = output.read_text().splitlines()
    assert "step 7: eval accuracy 0.5000" in lines
    assert "step 7: no checkpoint: the disk is full" in lines
    assert lines[-1].endswith("  done"), "that it is over is said, also where its last step was shown already"
    assert sum(line.endswith("  done") for line in lines) == 1
    assert lines[-1].startswith("step 100/100  loss 0.0400")


def test_a_run_whose_job_was_pre_empted_is_watched_on_until_it_is_cancelled(growing: Growing, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    with watching(str(growing.folder.path), output=output) as process:
        wait_until(lambda: "step 6/100" in output.read_text(), seconds=60)
        growing.write(0, "error", 7, type="Stopped", message="makes way", traceback="")
        growing.folder.write_result("stopped", "makes way", goes_on=True)
        wait_until(lambda: "makes way" in output.read_text(), seconds=60)
        growing.put_aside(6)
        growing.start()
        growing.steps(7, 9)
        growing.write(0, "error", 10, type="Stopped", message="makes way again", traceback="")
        growing.folder.write_result("stopped", "makes way again", goes_on=True)
        wait_until(lambda: "makes way again" in output.read_text(), seconds=60)
        assert process.poll() is None
        growing.folder.slurm.mkdir()
        (growing.folder.slurm / CANCELLED).touch()
        assert process.wait(timeout=60) == 0
    assert output.read_text().splitlines()[-1].startswith("step 9/100")


def test_a_run_that_goes_on_says_so(growing: Growing, capsys: pytest.CaptureFixture[str]) -> None:
    growing.folder.write_result("stopped", "It makes way.", goes_on=True)
    assert main(["watch", str(growing.folder.path), "--json"]) == 0
    state = json.loads(capsys.readouterr().out)
    assert state["goes_on"]
    assert state["message"] == "It makes way. It goes on when Slurm starts its job again."


def test_in_a_terminal_the_view_is_drawn_and_redrawn_until_the_run_ends(growing: Growing) -> None:
    ours, theirs = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "90", "LINES": "30"}
    command = [sys.executable, "-m", "shoal", "watch", str(growing.folder.path)]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    os.set_blocking(ours, False)
    shown = bytearray()

    def has_come(words: bytes) -> bool:
        with contextlib.suppress(OSError):  # nothing is there; or its side is closed, as it has ended
            shown.extend(os.read(ours, 65536))
        return words in shown

    try:
        wait_until(lambda: has_come(b"step 6 of 100"), seconds=60)
        growing.steps(7, 50)
        wait_until(lambda: has_come(b"step 50 of 100"), seconds=60)
        growing.folder.write_result("stopped", "it was asked to")
        wait_until(lambda: has_come(b"it was asked to"), seconds=60)
        wait_until(lambda: has_come(b"\x1b[?25h"), seconds=60)  # the cursor is seen again
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait(timeout=20)
        os.close(ours)
    assert b"\x1b[1A" in shown, "the cursor goes up to draw again"


def test_ctrl_c_leaves_the_run_and_is_no_failure(growing: Growing, tmp_path: Path) -> None:
    output = tmp_path / "output.txt"
    with watching(str(growing.folder.path), "--web", output=output) as process:
        wait_until(lambda: "Ctrl-C" in output.read_text(), seconds=60)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
    assert "gpt-1 is left as it is." in output.read_text()
    assert growing.folder.read_result()["status"] == "unfinished"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--port", "8000"], "Add --web"),
        (["--web", "--port", "70000"], "0 (a free one) to 65535"),
        (["--web", "--once"], "Give one of them"),
        (["--web", "--json"], "Give one of them"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    growing: Growing, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(growing.folder.path), *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_folder_that_is_no_run_and_a_port_that_is_taken_are_refused(
    growing: Growing, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["watch", str(growing.folder.path), "--web", "--port", port]) == 2
    assert f"--port {port} cannot be had" in capsys.readouterr().err

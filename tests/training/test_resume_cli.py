"""`shoal train --resume`: by another number of workers, from the command line, as people do it."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.fault.checkpoint.manifest import committed
from shoal.fault.inject import environment, fail_at, slow
from tests.support.files import job_file
from tests.support.waiting import wait_until


def shoal(folder: Path, *arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "shoal", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**os.environ, **variables}, capture_output=True, text=True, timeout=120, check=False
    )


def losses(folder: Path) -> dict[int, float]:
    events = EventReader(RunFolder(folder).events_of(0)).poll()
    return {e["step"]: e["loss"] for e in events if e["kind"] == "step"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was never stopped, and one of which a worker died, gone on with by 3 workers."""
    folder = tmp_path_factory.mktemp("runs")
    file = str(job_file(folder))
    settings = ("--checkpoint-every", "2")
    assert shoal(folder, "train", file, "--workers", "1", "--name", "whole", *settings).returncode == 0
    # In the third checkpoint: the first is committed by then, for at most one more is on its way.
    killed = environment([fail_at(1, 6, point="checkpoint: writing")])
    died = shoal(folder, "train", file, "--workers", "2", "--on-loss", "stop", *settings, **killed)
    assert died.returncode == 1, died.stderr
    assert "worker 1" in died.stderr
    assert RunFolder(folder / "runs" / "tiny-1").read_result()["status"] == "failed"
    done = shoal(folder, "train", file, "--workers", "3", "--resume", *settings, "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "Going on after step 2" in done.stderr or "Going on after step 4" in done.stderr
    return folder / "runs"


def test_a_run_that_died_is_gone_on_with_by_another_number_of_workers(runs: Path) -> None:
    found, expected = losses(runs / "tiny-1"), losses(runs / "whole")
    assert list(found) == [1, 2, 3, 4, 5, 6]
    assert found == pytest.approx(expected, rel=1e-5)
    assert RunFolder(runs / "tiny-1").read_result()["status"] == "done"
    assert not (runs / "tiny-2").exists()


def test_the_events_of_the_attempt_before_are_kept_apart(runs: Path) -> None:
    events: list[dict[str, Any]] = EventReader(runs / "tiny-1" / "events" / "attempt-1" / "rank-0.jsonl").poll()
    assert events[0]["kind"] == "start"
    now = EventReader(RunFolder(runs / "tiny-1").events_of(0)).poll()
    assert [event["kind"] for event in now].count("start") == 1
    assert not any(event["kind"] == "error" for event in now)


@pytest.fixture(scope="module")
def going(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a run that is being trained: it stands after a checkpoint."""
    folder = tmp_path_factory.mktemp("going")
    file = str(job_file(folder))
    stands = environment([slow(0, 4, seconds=600)])
    command = [sys.executable, "-m", "shoal", "train", file, "--workers", "2", "--checkpoint-every", "2"]
    with subprocess.Popen(command, cwd=folder, env={**os.environ, **stands}, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: bool(committed(folder / "runs" / "tiny-1" / "checkpoints")), seconds=120)
            yield folder
        finally:
            process.kill()


def test_a_run_that_is_being_trained_is_not_taken_over(going: Path) -> None:
    run = RunFolder(going / "runs" / "tiny-1")
    refused = shoal(going, "train", "tiny.py", "--resume", "runs/tiny-1")
    assert refused.returncode == 2
    assert f"tiny-1 is being trained, by process {json.loads(run.lock.read_text())['process']} on" in refused.stderr
    assert not list(run.events.glob("attempt-*"))
    assert EventReader(run.events_of(0)).poll()[0]["kind"] == "start"


def test_without_a_name_it_is_passed_over(going: Path) -> None:
    done = shoal(going, "train", "tiny.py", "--resume", "--json")
    assert done.returncode == 0, done.stderr
    assert RunFolder(going / "runs" / "tiny-2").read_result()["status"] == "done"
    assert RunFolder(going / "runs" / "tiny-1").read_result()["status"] == "unfinished"


def test_weights_are_exported(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(runs / "tiny-1"), str(tmp_path / "weights"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 6
    assert (tmp_path / "weights" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--resume", "nowhere"], "is not a run folder"),
        (["--resume", "runs/tiny-1", "--name", "new"], "--name names a new run, and --resume one that there is"),
        (["--checkpoint-every", "0"], "--checkpoint-every 0: write one after at least 1 step"),
        (["--weights", "nowhere"], "there is no nowhere to begin with"),
        (["--keep", "0"], "keep at least 1"),
    ],
)
def test_mistakes_are_said(
    arguments: list[str], sentence: str, runs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(runs.parent)
    assert main(["train", "tiny.py", *arguments]) == 2
    assert sentence in capsys.readouterr().err

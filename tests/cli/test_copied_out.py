"""Runs on storage that is erased with the job: they are kept, however they end."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import main
from tests.support.files import job_file
from tests.support.waiting import wait_until

SLOW = """
import time
from pathlib import Path

def f(number):
    while number > 2 and not Path({gate!r}).exists():
        time.sleep(0.01)
    return number * 10
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder that is erased with the job, and the one that this is started in."""
    local, project = tmp_path / "local", tmp_path / "project"
    for folder in (local, project):
        folder.mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(local))
    monkeypatch.chdir(project)
    return local, project


def test_a_run_in_a_jobs_own_folder_is_copied_out_when_it_fails(
    tmp_path: Path, places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    file = job_file(tmp_path, "def broken(output, batch): raise ValueError('on purpose')\nfields['loss'] = broken\n")
    assert main(["train", str(file), "--workers", "1", "--name", "it", "--runs", str(tmp_path / "local" / "runs")]) != 0
    assert "was copied to" in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "project/runs/it/result.json").read_text())["status"] == "failed"


def test_the_results_of_a_map_are_copied_out_and_what_is_printed_says_where(
    tmp_path: Path, places: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    local, project = places
    (tmp_path / "f.py").write_text(SLOW.format(gate=str(tmp_path)))
    assert main(["map", f"{tmp_path / 'f.py'}:f", "range:0:5", "--out", str(local / "it"), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["results"] == str(project / "runs" / "it" / "results.jsonl")
    assert len((project / "runs" / "it" / "results.jsonl").read_text().splitlines()) == 5
    assert "was copied to" in printed.err


def test_a_map_that_is_told_to_end_is_copied_out_with_what_is_done(tmp_path: Path, places: tuple[Path, Path]) -> None:
    local, project = places
    (tmp_path / "f.py").write_text(SLOW.format(gate=str(tmp_path / "gate")))
    asked = ["map", f"{tmp_path / 'f.py'}:f", "range:0:8", "--workers", "1", "--out", str(local / "it")]
    process = subprocess.Popen([sys.executable, "-m", "shoal", *asked], stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: len(list((local / "it").glob("done/*.journal"))) > 0, seconds=60)
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait(10)
    assert process.returncode == 75
    assert "SIGTERM: " in said
    assert list((project / "runs" / "it" / "done").glob("*.journal"))

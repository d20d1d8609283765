"""Runs on storage that is erased with the job: they are kept, however they end."""

import json
from pathlib import Path

import pytest

from shoal.cli.main import main
from tests.support.files import job_file


def test_a_run_in_a_jobs_own_folder_is_copied_out_when_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in ("local", "project"):
        (tmp_path / folder).mkdir()
    monkeypatch.setenv("SLURM_TMPDIR", str(tmp_path / "local"))
    monkeypatch.chdir(tmp_path / "project")
    file = job_file(tmp_path, "def broken(output, batch): raise ValueError('on purpose')\nfields['loss'] = broken\n")
    assert main(["train", str(file), "--workers", "1", "--name", "it", "--runs", str(tmp_path / "local" / "runs")]) != 0
    assert "was copied to" in " ".join(capsys.readouterr().err.split())
    assert json.loads((tmp_path / "project/runs/it/result.json").read_text())["status"] == "failed"

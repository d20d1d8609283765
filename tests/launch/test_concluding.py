"""How a run on this machine is written down at its end: nothing that fails there changes what came of it."""

from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.run_folder import RunFolder
from shoal.report.page import conclude
from tests.support.files import job_file


def test_a_page_that_cannot_be_written_hides_neither_an_error_nor_a_result(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_page(_: RunFolder) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(conclude, "write_page", no_page)
    body = "def broken(o, b): raise KeyError('oh')\nfields['loss'] = broken\n"
    runs = ["--workers", "1", "--runs", str(tmp_path / "runs")]
    assert main(["train", str(job_file(tmp_path, body)), *runs]) == 1
    said = capfd.readouterr().err
    assert "there is no page of" in said
    assert said.splitlines()[-1] == "WorkerFailed: worker 0 raised KeyError: 'oh'"
    assert main(["train", str(job_file(tmp_path)), *runs]) == 0
    assert "No space left on device" in capfd.readouterr().err

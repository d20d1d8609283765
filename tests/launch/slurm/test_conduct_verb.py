"""`shoal conduct` with a stand-in for srun: what is done when the workers have ended. This is not about Slurm."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.run_folder import RunFolder
from shoal.report.page import conclude
from tests.support.runs import make_run

Conduct = Callable[..., int]
START = {"kind": "start", "time": 1.0, "pid": 1, "host": "h"}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = make_run(tmp_path, workers=2, status=None)
    folder.slurm.mkdir()
    return folder


@pytest.fixture
def conduct(run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conduct:
    """Conduct the run in job 12 with an srun that writes a start and these words for both workers, and ends."""

    def conducted(*words: dict[str, object], code: int, begins: bool = True) -> int:
        lines = "".join(json.dumps(one) + "\n" for one in ((START,) * begins + words))
        (tmp_path / "words").write_text(lines)
        logs = " ".join(f"'{run.events_of(rank)}'" for rank in range(2))
        script = f"#!/bin/sh\nfor log in {logs}; do cat '{tmp_path / 'words'}' >>\"$log\"; done\nexit {code}\n"
        (tmp_path / "srun").write_text(script)
        (tmp_path / "srun").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        monkeypatch.setenv("SLURM_JOB_ID", "12")
        return main(["conduct", str(run.path)])

    return conducted


def error(kind: str) -> dict[str, object]:
    return {"kind": "error", "time": 2.0, "type": kind, "message": f"{kind} it was", "traceback": ""}


def no_page(_: RunFolder) -> Path:
    raise OSError(28, "No space left on device")


def test_a_job_that_goes_on_is_let_go_before_anybody_draws_a_page(run: RunFolder, conduct: Conduct) -> None:
    assert conduct(error("Stopped"), code=75) == 75
    assert run.read_result() == {"status": "stopped", "message": "Stopped it was", "goes_on": True}
    assert not run.report_html.exists()


def test_a_job_that_is_over_has_its_page(run: RunFolder, conduct: Conduct) -> None:
    assert conduct({"kind": "end", "time": 2.0, "step": 12}, code=0) == 0
    assert run.read_result()["status"] == "done"
    assert run.report_html.exists()


def test_workers_that_began_a_moment_before_all_was_over_were_lost(conduct: Conduct) -> None:
    assert conduct(code=137) == 75


def test_that_workers_began_in_an_earlier_start_does_not_count(run: RunFolder, conduct: Conduct) -> None:
    for rank in range(2):
        with run.events_of(rank).open("a") as file:
            file.write(json.dumps(START) + "\n")
    assert conduct(code=1, begins=False) == 1
    assert run.read_result()["status"] == "failed"


def test_the_store_is_there_before_the_workers_are(
    run: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that nobody else can take its port meanwhile. This srun is a worker that meets nobody else."""
    script = (
        f"#!{sys.executable}\n"
        "from shoal.comm.rank import read_rank\n"
        "from shoal.comm.store import connect\n"
        "rank = read_rank()\n"
        "connect(rank, timeout_s=20).set('met', 'yes')\n"
        f"open({str(tmp_path / 'met')!r}, 'w').write(f'{{rank.index}} {{rank.store_is_hosted}}')\n"
    )
    (tmp_path / "srun").write_text(script)
    (tmp_path / "srun").chmod(0o755)
    step = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    for name, value in {**step, "SLURM_JOB_ID": "12", "PATH": f"{tmp_path}:{os.environ['PATH']}"}.items():
        monkeypatch.setenv(name, value)
    main(["conduct", str(run.path)])
    assert (tmp_path / "met").read_text() == "0 True"


def test_an_address_that_is_not_this_nodes_fails_the_run_with_a_sentence(
    run: RunFolder, conduct: Conduct, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    monkeypatch.setenv("SLURMD_NODENAME", "203.0.113.7")
    assert conduct(code=0) == 2
    assert "cannot listen on 203.0.113.7" in run.read_result()["message"]


def test_a_page_that_cannot_be_written_changes_no_exit_code(
    conduct: Conduct, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conclude, "write_page", no_page)
    assert conduct(error("DataError"), code=3) == 2
    said = capfd.readouterr().err
    assert "No space left on device" in said
    assert "To try again: shoal report" in said
    assert said.splitlines()[-1] == "DataError: DataError it was"


def test_a_result_that_cannot_be_written_does_not_keep_the_job_from_going_on(
    conduct: Conduct, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "write_result", lambda run, *_, **__: no_page(run))
    assert conduct(error("Stopped"), code=75) == 75
    assert "is stopped could not be written down: OSError" in capfd.readouterr().err

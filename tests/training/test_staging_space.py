"""The space of a staged pack is given back when a run ends, however it ends."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.comm.rank import ALONE
from shoal.core.run_folder import RunFolder
from shoal.data.stage.copies import Desk
from shoal.report.summary import summarize
from shoal.spec.job import Job
from shoal.spec.plan import Plan
from tests.data.stage.late import until
from tests.support.files import job_file
from tests.support.training import bare_folder, train_part
from tests.training.test_pack_job import regression

TIMEOUT_S = 60.0
pytestmark = pytest.mark.usefixtures("own_desk")


def failing(*, path: str, fast: str) -> Job:
    """A job whose loss fails in its fifth step, when parts have come to `fast`."""
    calls = []

    def fails(output: torch.Tensor, batch: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 4:
            assert list(Path(fast).rglob("*.arrow"))
            raise RuntimeError("as told")
        return output.square().mean()

    return replace(regression(path=path), loss=fails, eval_data=None)


def test_space_is_given_back_after_an_exception_in_the_model(rows: Path, tmp_path: Path) -> None:
    plan, fast = Plan(staging=str(tmp_path / "fast")), tmp_path / "fast"
    arguments: dict[str, object] = {"path": str(rows), "fast": str(fast)}
    builder, folder = f"{__name__}:failing", bare_folder(tmp_path, plan)
    with pytest.raises(RuntimeError, match="as told"):
        train_part(ALONE, builder=builder, arguments=arguments, plan=plan, folder=folder)
    assert list(fast.iterdir()) == []
    assert Desk().copies() == []


PACKED = """
from dataclasses import replace
from pathlib import Path
fields['data'] = str(Path(__file__).with_name('rows.pack'))
fields['inputs'] = lambda batch: batch['x']
fields['loss'] = lambda o, b: time.sleep(0.02) or ((o[:, 0] - b['y']) ** 2).mean()
fields['steps'] = 100000
"""


def test_space_is_given_back_after_a_worker_was_killed(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.pack").symlink_to(rows)
    file, fast = job_file(tmp_path, PACKED), tmp_path / "fast"
    arguments = ["--workers", "2", "--stage", "./fast", "--name", "x", "--on-loss", "stop"]
    command = [sys.executable, "-m", "shoal", "train", str(file), *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        logs = [tmp_path / f"runs/x/events/rank-{rank}.jsonl" for rank in range(2)]
        until(lambda: all(log.exists() and log.read_text().count('"step"') >= 3 for log in logs))
        assert len(list(fast.rglob("*.pack"))) == 1
        os.kill(json.loads(logs[1].read_text().splitlines()[0])["pid"], signal.SIGKILL)
        _, said = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.wait(TIMEOUT_S)
    assert "was killed by SIGKILL" in said
    assert f"is being staged to {fast}" in said.replace("\n", " ")
    until(lambda: list(fast.iterdir()) == [])
    summary = summarize(RunFolder.open(tmp_path / "runs" / "x"))
    assert summary.staging[0].startswith(f"{rows}: staged to {fast}")

"""Loops of people's own stop in order, too: after the same step, with a checkpoint, and exit code 75."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli.main import main
from shoal.core.errors import Stopped
from shoal.core.run_folder import RunFolder
from shoal.fault import inject
from shoal.fault.checkpoint.manifest import committed, step_of
from shoal.spec.plan import Checkpoints, Plan
from tests.support.files import job_file
from tests.support.jobs import linear

OWN_LOOP = """
if __name__ == "__main__":
    import signal
    with shoal.start(job, name="mine") as run:
        for batch in run.batches():
            run.step(batch)
            if run.step_count == 3 and run.rank.index == 0:
                os.kill(os.getpid(), signal.SIGTERM)
    print("not reached")
"""


def train_until_asked(runs: Path, plan: Plan | None = None) -> None:
    """Train with a loop of one's own that gets SIGTERM in its step 3."""
    with shoal.start(linear(steps=400), runs=runs, name="own", plan=plan) as run:
        for batch in run.batches():
            run.step(batch)
            if run.step_count == 3:
                os.kill(os.getpid(), signal.SIGTERM)


def test_an_own_loop_stops_with_a_checkpoint_and_is_gone_on_with(tmp_path: Path) -> None:
    whole = shoal.train(linear(steps=400), runs=tmp_path, name="whole").losses
    with pytest.raises(Stopped, match="stopped by SIGTERM to worker 0 after step") as end:
        train_until_asked(tmp_path)
    assert end.value.exit_code == 75
    folder = RunFolder(tmp_path / "own")
    assert folder.read_result()["status"] == "stopped"
    (saved,) = committed(folder.checkpoints)
    plan = Plan(checkpoint=Checkpoints(resume=True))
    with shoal.start(linear(steps=400), plan=plan, runs=tmp_path, name="own") as run:
        assert run.step_count == step_of(saved)
        losses = [run.step(batch) for batch in run.batches()]
    assert losses == list(whole[step_of(saved) :])
    assert folder.read_result()["status"] == "done"


def test_a_stop_waits_for_the_copy_from_the_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = inject.slow(0, 1, seconds=0.5, point="checkpoint: copying out")
    monkeypatch.setenv(*next(iter(inject.environment([slow]).items())))
    with pytest.raises(Stopped, match="with a checkpoint"):
        train_until_asked(tmp_path, Plan(checkpoint=Checkpoints(local=str(tmp_path / "local"))))
    inject.end()
    assert len(committed(tmp_path / "own" / "checkpoints")) == 1
    assert not list((tmp_path / "local").rglob("*.safetensors"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_script_that_is_stopped_exits_with_75_and_one_sentence(workers: int, tmp_path: Path) -> None:
    script = job_file(tmp_path, "fields['steps'] = 100_000", job=f"job = shoal.Job(**fields)\n{OWN_LOOP}")
    alone = [sys.executable, str(script)]
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers), str(script)]
    done = subprocess.run(
        alone if workers == 1 else launched, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 75 if workers == 1 else done.returncode != 0, done.stderr  # torchrun has its own
    assert "Stopped: stopped by SIGTERM to worker 0 after step" in done.stderr
    assert "not reached" not in done.stdout
    if workers == 1:
        assert "Traceback" not in done.stderr
    assert json.loads((tmp_path / "runs/mine/result.json").read_text())["status"] == "stopped"
    assert committed(tmp_path / "runs/mine/checkpoints")


def test_the_command_stops_before_its_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(job_file(tmp_path, "fields['steps'] = 1_000_000"))
    command = [sys.executable, "-m", "shoal", "train", file, "--workers", "2", "--name", "x"]
    done = subprocess.run(
        [*command, "--wall-limit", "30s", "--notice", "12s"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 75, done.stderr
    if "while it waited to be let in" not in done.stderr:  # a machine so slow that its time was over at the start
        assert "stopped by the wall-clock limit after step" in done.stderr
        assert committed(tmp_path / "runs/x/checkpoints")
    assert main(["train", file, "--wall-limit", "soon"]) == 2
    assert "--wall-limit 'soon' is not a time limit" in capsys.readouterr().err

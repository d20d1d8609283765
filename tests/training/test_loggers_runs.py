"""Runs with loggers, from end to end: by processes that follow them, through resumes and past dead servers."""

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.cli.main import main
from shoal.core.run_folder import RunFolder
from shoal.training.loggers.logger import Kept
from tests.support.curves import about
from tests.support.files import job_file
from tests.support.jobs import EXAMPLES, linear
from tests.support.tensorboard_file import shown
from tests.support.wandb_file import read_offline

pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow's own library


def train(runs: Path, steps: int, log: str | None = None) -> dict[int, float]:
    """Train with a loop of one's own, and checkpoints, and return what it logged."""
    plan = shoal.Plan(checkpoint=shoal.Checkpoints(every_steps=4, resume=True))
    logged = {}
    data = linear().data
    with shoal.start(linear(steps=steps, eval_data=data), plan=plan, name="run", runs=runs, log=log) as run:
        for batch in run.batches():
            value = 10 * run.step(batch)
            run.log(tenfold=value)
            logged[run.step_count] = value
        run.evaluate()
    return logged


def test_a_run_that_goes_on_is_one_curve_in_every_logger(
    mlflow_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_address)
    # The script that was started is a file of the run: not pytest's, which has another name or none, as it is started.
    (tmp_path / "mine.py").touch()
    monkeypatch.setattr(sys.modules["__main__"], "__file__", str(tmp_path / "mine.py"), raising=False)
    logged = train(tmp_path, 6, "tensorboard,wandb,mlflow")
    folder = RunFolder.open(tmp_path / "run")
    before = {name: Kept.read(folder, name) for name in ("wandb", "mlflow")}
    assert [kept.step for kept in before.values()] == [6, 6]
    shutil.rmtree(folder.checkpoints / "step-00000006")  # so that steps 5 and 6 are done again
    again = train(tmp_path, 12)  # where its numbers go, the run itself knows
    assert min(again) == 5
    assert again[6] == logged[6]
    logged |= again

    curve = about(sorted(logged.items()))
    shows, _ = shown(folder.tensorboard)
    assert shows["tenfold"] == curve
    assert shows["loss"][-1:] == about([(12, logged[12] / 10)])
    ids, values, config, files = read_offline(folder.path)
    assert ids == {before["wandb"].id}
    assert [(step, found["tenfold"]) for step, found in sorted(values.items()) if "tenfold" in found] == curve
    assert config["job"]["steps"] == 12
    wanted = {"report.html", "plan.toml", "job.toml", "code", "export"}
    assert wanted <= {file.partition("/")[0] for file in files}
    client, run_id = MlflowClient(), Kept.read(folder, "mlflow").id
    assert run_id == before["mlflow"].id
    assert [(point.step, point.value) for point in client.get_metric_history(run_id, "tenfold")] == curve
    assert [point.step for point in client.get_metric_history(run_id, "eval/loss")] == [6, 12]
    assert wanted <= {each.path for each in client.list_artifacts(run_id)}
    found = client.get_run(run_id)
    assert (found.info.status, found.data.params["job.steps"], found.data.tags["job.steps"]) == ("FINISHED", "6", "12")


def test_a_server_that_takes_calls_and_says_nothing_does_not_hold_up_training(
    mlflow_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{silent.getsockname()[1]}")
        expected = shoal.train(linear(steps=5), runs=tmp_path, name="without").losses
        summary = shoal.train(linear(steps=5), runs=tmp_path, name="run", log="mlflow")
    assert summary.status == "done"
    assert summary.losses == expected
    said = capfd.readouterr().err
    assert said.count("mlflow does not take the run's numbers") == 1
    assert "mlflow has the run up to step 0. The rest later: shoal log" in said
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_address)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
    assert main(["log", str(tmp_path / "run"), "--to", "mlflow", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["mlflow"]["step"] == 5


def test_workers_of_a_run_without_an_account_are_logged_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # where an account would be
    monkeypatch.chdir(tmp_path)
    file = str(job_file(tmp_path))
    assert main(["train", file, "--workers", "2", "--log", "wandb", "--json"]) == 0
    losses = json.loads(capfd.readouterr().out)["losses"]
    _, values, _, _ = read_offline(tmp_path / "runs/tiny-1")
    assert values[6]["loss"] == pytest.approx(losses[-1])
    assert not (tmp_path / "runs/tiny-1/tensorboard").exists()


def test_the_example_logs_what_it_computes_to_every_logger(
    mlflow_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_address)
    command = [sys.executable, str(EXAMPLES / "logged.py"), "--log", "tensorboard,wandb,mlflow"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=120)
    _, values, _, _ = read_offline(tmp_path / "runs/logged-1")
    shows, texts = shown(tmp_path / "runs/logged-1/tensorboard")
    curve = [(step, found["decibel"]) for step, found in sorted(values.items()) if "decibel" in found]
    assert [step for step, _ in curve] == list(range(1, 41))
    assert shows["decibel"] == about(curve)
    run_id = Kept.read(RunFolder.open(tmp_path / "runs/logged-1"), "mlflow").id
    points = MlflowClient().get_metric_history(run_id, "decibel")
    assert [(point.step, point.value) for point in points] == about(curve)
    assert set(texts) == {"job/text_summary", "plan/text_summary", "run/text_summary"}


def test_a_logger_that_there_is_not_is_refused_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for asked, sentence in (("wndb", "Did you mean 'wandb'"), ("mlflow", "MLFLOW_TRACKING_URI is not set")):
        assert main(["train", str(job_file(tmp_path)), "--log", asked]) == 2
        assert sentence in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()
    assert main(["log", str(tmp_path), "--to", "wandb"]) == 2

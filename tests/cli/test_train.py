"""`shoal train` from end to end: one run with two workers, looked at from all sides."""

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboardX.proto.event_pb2 import Event

import shoal
from shoal.cli.main import main
from shoal.core.events import EventReader
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.spec.plan import Plan
from shoal.spec.record import JobRecord, RunRecord
from tests.support.files import job_file

EVALUATED = """
fields['eval_data'] = torch.utils.data.TensorDataset(x[:11], x[:11].sum(1))
fields['metrics'] = {'error': lambda output, batch: (output[:, 0] - batch[1]).abs().mean()}
fields['eval_every_steps'] = 4
if worker >= 0:
    print("hello from", worker)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, dict[str, Any], str]:
    """A run of 6 steps with 2 workers: its folder, the object --json printed, and what went to stderr."""
    folder = tmp_path_factory.mktemp("trained")
    file = job_file(folder, EVALUATED, name="a job.py")
    command = [sys.executable, "-m", "shoal", "train", str(file), "--workers", "2", "--name", "it's mine", "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=True)
    return RunFolder.open(folder / "runs" / "it's mine"), json.loads(done.stdout), done.stderr


Trained = tuple[RunFolder, dict[str, Any], str]


def test_json_has_the_run_its_losses_its_speed_and_its_memory_beside_the_prediction(trained: Trained) -> None:
    folder, result, _ = trained
    assert result["status"] == "done"
    assert Path(result["run"]).name == folder.name
    assert len(result["losses"]) == 6
    assert result["losses"][-1] < result["losses"][0]
    assert result["samples_per_s"] > 0
    assert len(result["peak_bytes"]) == 2
    assert len(result["predicted"]["peak_bytes"]) == 2
    assert result["predicted"]["step_s"] > 0
    assert result["missing"] == []


def test_the_run_folder_tells_the_circumstances(trained: Trained) -> None:
    folder, _, _ = trained
    record, job = read_toml(RunRecord, folder.run_toml), read_toml(JobRecord, folder.job_toml)
    assert record.versions["shoal"] == shoal.__version__
    assert record.versions.keys() >= {"python", "torch", "numpy"}
    assert "train" in record.command
    assert (job.num_samples, job.batch_size, job.steps, job.unit) == (40, 8, 6, "samples")
    assert read_toml(Plan, folder.plan_toml).workers == 2
    assert (folder.code / "a job.py").read_text().endswith("job = shoal.Job(**fields)\n")


def test_every_worker_has_a_log_and_worker_0_the_evaluations(trained: Trained) -> None:
    folder, result, _ = trained
    logs = [EventReader(folder.events_of(rank)).poll() for rank in range(2)]
    for log in logs:
        assert [event["loss"] for event in log if event["kind"] == "step"] == result["losses"]
    evals = [event for event in logs[0] if event["kind"] == "eval"]
    assert [event["step"] for event in evals] == [4, 6]
    assert set(evals[-1]["metrics"]) == {"loss", "error"}
    assert result["metrics"] == evals[-1]["metrics"]


def test_evaluation_is_the_mean_over_the_whole_set(trained: Trained, tmp_path: Path) -> None:
    """Two workers over 11 samples in batches of 8: parts of 4, 4, 2 and 1. One worker must find the same."""
    _, result, _ = trained
    from shoal.training.jobfile import load_job

    job = load_job(job_file(tmp_path, EVALUATED))
    summary = shoal.train(job, runs=tmp_path / "runs")
    assert summary.metrics == pytest.approx(result["metrics"], rel=1e-5)
    assert list(summary.losses) == pytest.approx(result["losses"], rel=1e-5)


def test_tensorboard_has_the_scalars(trained: Trained) -> None:
    folder, result, _ = trained
    values: dict[str, dict[int, float]] = {}
    for path in folder.tensorboard.iterdir():
        for event in tensorboard_events(path.read_bytes()):
            for value in event.summary.value:
                values.setdefault(value.tag, {})[event.step] = value.simple_value
    assert values["loss"][1] == pytest.approx(result["losses"][0], rel=1e-6)
    assert values["samples_per_s"][1] > 0
    assert values["seconds/forward"][1] > 0
    assert set(values["eval/error"]) == {4, 6}


def tensorboard_events(data: bytes) -> list[Any]:
    """Return the events of a TensorBoard file: records of (length, crc, bytes, crc)."""
    events, offset = [], 0
    while offset < len(data):
        (length,) = struct.unpack_from("<Q", data, offset)
        events.append(Event.FromString(data[offset + 12 : offset + 12 + length]))
        offset += 12 + length + 4
    return events


def test_what_workers_print_is_shown_with_their_number_and_not_on_stdout(trained: Trained) -> None:
    _, _, errors = trained
    assert "[worker 0] hello from 0" in errors
    assert "[worker 1] hello from 1" in errors
    assert "step 6/6  loss " in errors


def test_report_writes_the_page_anew(trained: Trained, capfd: pytest.CaptureFixture[str]) -> None:
    folder, result, _ = trained
    folder.report_html.unlink()
    assert main(["report", str(folder.path), "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["losses"] == result["losses"]
    assert "<html" in folder.report_html.read_text()[:1000]
    assert main(["report", str(folder.path)]) == 0
    assert "Trained 6 steps on 2 workers" in capfd.readouterr().out


def test_a_plan_file_is_followed_and_flags_override_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("precision = 'bf16'\n[mesh]\nreplicate = 3\n[batch]\nmicro_batch = 2\nshares = [0.5, 0.25, 0.25]\n")
    flags = ["--plan", str(plan), "--workers", "1", "--steps", "2", "--runs", str(tmp_path), "--name", "p", "--json"]
    assert main(["train", str(job_file(tmp_path)), *flags]) == 0
    used = read_toml(Plan, tmp_path / "p" / "plan.toml")
    assert (used.workers, used.shares, used.precision, used.batch.micro_batch) == (1, (1.0,), "bf16", 2)
    assert len(json.loads(capfd.readouterr().out)["losses"]) == 2


def test_a_logger_that_is_not_installed_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shoal.training.loggers.registry.find_spec", lambda _: None)
    assert main(["train", str(job_file(tmp_path)), "--runs", str(tmp_path / "runs"), "--name", "mine"]) == 2
    assert "tensorboard is not installed" in capfd.readouterr().err
    assert not (tmp_path / "runs" / "mine").exists()

"""Bad input gets one clear sentence and the right exit code."""

import json
from pathlib import Path

import pytest

from shoal.cli.main import main
from tests.support.files import job_file


def fails(
    capfd: pytest.CaptureFixture[str], *arguments: str | Path, exit_code: int = 2, folder: Path | None = None
) -> str:
    """Run the command line, which must fail with `exit_code`, and return the sentence it printed last."""
    runs = ["--runs", str(folder / "runs")] if folder else []
    assert main([str(argument) for argument in arguments] + runs) == exit_code
    return capfd.readouterr().err.strip().splitlines()[-1]


def test_a_file_that_is_not_there(capfd: pytest.CaptureFixture[str]) -> None:
    assert fails(capfd, "train", "nowhere.py") == "ConfigError: there is no file nowhere.py."


def test_an_unknown_key_in_the_plan(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[batch]\nmicro_bach = 4\n")
    sentence = "ConfigError: unknown key 'micro_bach' in plan.toml [batch]. Did you mean 'micro_batch'?"
    assert fails(capfd, "train", job_file(tmp_path), "--plan", plan) == sentence


def test_an_unknown_field_of_the_job(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = job_file(tmp_path, "fields['bath_size'] = fields.pop('batch_size')")
    sentence = "ConfigError: Job has no field 'bath_size'. Did you mean 'batch_size'?"
    assert fails(capfd, "train", file, folder=tmp_path) == sentence


def test_an_unknown_flag(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["train", "x.py", "--wokers", "2"])
    assert exit_info.value.code == 2
    assert "unrecognized arguments: --wokers 2" in capfd.readouterr().err


def test_a_job_file_that_raises(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = job_file(tmp_path, "\ndef f():\n    return 1 / 0\nf()")
    sentence = fails(capfd, "train", file, folder=tmp_path)
    assert sentence == f"JobError: tiny.py:{_line(file, '1 / 0')} raises ZeroDivisionError: division by zero."


def test_a_job_file_that_is_not_python(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = job_file(tmp_path, "def (:")
    assert fails(capfd, "train", file, folder=tmp_path).startswith(f"JobError: tiny.py:{_line(file, 'def (:')} is not")


def test_a_job_file_without_a_job(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = "JobError: tiny.py has no 'job'. Write: job = shoal.Job(...)."
    assert fails(capfd, "train", job_file(tmp_path, job=""), folder=tmp_path) == sentence
    file = job_file(tmp_path, job="my_job = shoal.Job(**fields)")
    assert (
        fails(capfd, "train", file, folder=tmp_path) == "JobError: tiny.py has no 'job'. It has 'my_job': rename that."
    )


def test_a_job_that_is_something_else(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = "JobError: 'job' in tiny.py is a dict, not a shoal.Job."
    assert fails(capfd, "train", job_file(tmp_path, job="job = fields"), folder=tmp_path) == sentence


def test_shares_that_do_not_sum_to_one(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = "PlanError: shares 0.25,0.25,0.1,0.3 sum to 0.9. They must sum to 1."
    assert fails(capfd, "train", job_file(tmp_path), "--workers", "4", "--shares", ".25,.25,.10,.3") == sentence


def test_shares_that_are_no_numbers(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = "PlanError: --shares 'half,half' is not a list of numbers. Write them like .25,.25,.10,.4"
    assert fails(capfd, "train", job_file(tmp_path), "--shares", "half,half") == sentence


def test_shares_for_another_number_of_workers(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = "PlanError: 2 shares for 3 workers. Give one share to each worker."
    assert fails(capfd, "train", job_file(tmp_path), "--workers", "3", "--shares", ".5,.5") == sentence


def test_a_share_of_less_than_a_sample(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = fails(capfd, "train", job_file(tmp_path), "--shares", ".96,.04", folder=tmp_path)
    assert sentence.startswith("PlanError: the share 0.04 of replica 1 is less than one sample of a global batch of 8.")


def test_more_workers_than_samples(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = job_file(tmp_path, "fields['data'] = torch.utils.data.TensorDataset(x[:3], x[:3].sum(1))")
    sentence = "PlanError: 4 workers for 3 samples. Use at most 3."
    assert fails(capfd, "train", file, "--workers", "4", folder=tmp_path) == sentence


def test_more_workers_than_a_batch_has_samples(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sentence = fails(capfd, "train", job_file(tmp_path), "--workers", "9", folder=tmp_path)
    assert sentence.startswith("PlanError: 9 workers for a global batch of 8 samples. Use at most 8")


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--workers", "0"], "PlanError: mesh.replicate=0: a mesh has at least 1 worker."),
        (["--micro-batch", "0"], "PlanError: micro_batch=0: a micro-batch has at least 1 sample."),
        (["--precision", "fp8"], "PlanError: precision='fp8' is none. Known: bf16, fp32."),
        (["--steps", "0"], "ConfigError: --steps 0: train for at least 1 step."),
    ],
)
def test_flags_that_make_no_sense(
    flags: list[str], sentence: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert fails(capfd, "train", job_file(tmp_path), *flags) == sentence


def test_a_dataset_that_raises_in_the_middle(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    body = """
class Bad(torch.utils.data.TensorDataset):
    def __getitem__(self, index):
        if index == 33:
            raise OSError("row 33 is cut short")
        return super().__getitem__(index)
fields['data'] = Bad(x, x.sum(1))
"""
    file = job_file(tmp_path, body)
    sentence = fails(capfd, "train", file, "--workers", "2", folder=tmp_path)
    assert sentence.startswith("DataError: sample 33 cannot be loaded for step ")
    assert sentence.endswith(f": OSError: row 33 is cut short ({file}:{_line(file, 'raise OSError')}).")


def test_a_loss_that_is_nan_names_step_worker_and_samples_and_keeps_the_run(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = job_file(tmp_path, "x[13, 2] = float('nan')")
    sentence = fails(capfd, "train", file, "--workers", "2", "--micro-batch", "2", "--name", "nan", folder=tmp_path)
    assert sentence.startswith("NonFiniteLoss: the loss of step ")
    samples = sentence.split("samples ")[1].split(". The step")[0].split(", ")
    assert "13" in samples
    assert len(samples) == 2, "the samples of one micro-batch, not of the whole part"
    assert json.loads((tmp_path / "runs/nan/result.json").read_text())["status"] == "failed"
    assert (tmp_path / "runs/nan/report.html").stat().st_size > 0
    assert (tmp_path / "runs/nan/events/rank-1.jsonl").stat().st_size > 0


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ("fields['model'] = lambda: 3", "JobError: model() returned a int, not an nn.Module."),
        (
            "fields['optimizer'] = lambda p: None",
            "JobError: optimizer(parameters) returned a NoneType, not a torch.opt",
        ),
        ("fields['loss'] = lambda o, b: 3.0", "JobError: loss(output, batch) returned a float, not a scalar tensor"),
        ("fields['loss'] = lambda o, b: o", "JobError: loss(output, batch) returned a tensor of shape (8, 1), not a"),
        ("fields['weight'] = lambda b: -1", "JobError: weight(batch) returned -1. It counts"),
        ("fields['weight'] = lambda b: 0", "JobError: the global batch of step 1 weighs 0"),
        ("fields['model'] = lambda: nn.Linear(5, 1).requires_grad_(False)", "JobError: model() has no parameter to tr"),
    ],
)
def test_functions_of_the_job_that_return_what_cannot_be_trained_on(
    body: str, sentence: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import shoal
    from shoal.core.errors import ShoalError
    from shoal.training.jobfile import load_job

    job = load_job(job_file(tmp_path, body))
    with pytest.raises(ShoalError) as raised:
        shoal.train(job, runs=tmp_path / "runs")
    assert f"{type(raised.value).__name__}: {raised.value}".startswith(sentence)


def test_with_json_an_error_is_one_object_on_stdout(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["train", str(tmp_path / "nowhere.py"), "--json"]) == 2
    error = json.loads(capfd.readouterr().out)["error"]
    assert error["type"] == "ConfigError"
    assert "there is no file" in error["message"]


def _line(file: Path, text: str) -> int:
    return next(number for number, line in enumerate(file.read_text().splitlines(), start=1) if text in line)

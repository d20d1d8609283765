"""`shoal fit` as a person or a script calls it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.cli.main import main
from shoal.training.jobfile import load_job
from tests.support.files import job_file

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
CONFIG = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 6, "n_head": 4}
BRANCH = """
class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)

    def forward(self, x):
        if x.sum() > 0:
            return self.layer(x)
        return self.layer(-x)

fields['model'] = Branching
"""


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")


def figures(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    assert main(["fit", *map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    return found


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["fit", *map(str, arguments)]) == 2
    return capfd.readouterr().err.strip().splitlines()[-1]


def test_json_has_the_verdict_the_peak_and_its_parts_as_python_has_them(capfd: pytest.CaptureFixture[str]) -> None:
    found = figures(capfd, GPT, "--device", "H200", "--micro-batch", "4")
    estimate = shoal.fit(load_job(GPT), device="H200", micro_batch=4)
    assert found == json.loads(json.dumps(estimate.as_json()))
    assert found["fits"] is True
    assert sum(found["parts"].values()) == found["peak_bytes"]
    assert found["device"] == "NVIDIA H200"
    assert found["parameters"] == 10_872_576
    assert estimate.parts["gradients"] == 4 * estimate.parameters  # 8 samples, 4 at a time: they stay


def test_the_table_says_what_the_memory_goes_to_and_what_to_change(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(GPT), "--device", "v100-16"]) == 0
    out = capfd.readouterr().out
    said = ("It fits", "to spare", "The peak: backward of", "The largest micro-batch that fits is")
    parts = ("parameters", "optimizer state", "activations", "transient peak (", "needed")
    for words in (*said, *parts, "recompute full", "ZeRO-3 over"):
        assert words in out


def test_a_micro_batch_may_be_larger_than_the_jobs_batch(capfd: pytest.CaptureFixture[str]) -> None:
    small, large = (figures(capfd, GPT, "--device", "H200", "--micro-batch", size) for size in ("8", "16"))
    assert large["parts"]["activations"] == pytest.approx(2 * small["parts"]["activations"], rel=0.01)


def test_layers_are_shown_in_the_order_in_which_they_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", str(GPT), "--device", "H200", "--layers"]) == 0
    out = capfd.readouterr().out
    places = [out.index(words) for words in ("token", "blocks.0 and 5 more like it", "norm  ", "loss  ")]
    assert places == sorted(places)


def test_a_config_that_does_not_fit_is_answered_with_what_would_make_it(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "n_embd": 8192, "n_layer": 40, "n_head": 64, "dtype": "bfloat16"}))
    found = figures(capfd, path, "--device", "A100-80", "--sequence", "512")
    assert found["fits"] is False
    assert found["dtype"] == "bfloat16"
    assert found["parameters"] > 30e9
    helping = [change for change in found["changes"] if change["fits"]]
    assert any(change["title"].startswith("ZeRO-3") for change in helping)
    assert [change["time"] for change in helping] == sorted(change["time"] for change in helping)


def test_without_a_device_it_is_this_machine(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = figures(capfd, job_file(tmp_path))
    assert found["fits"] is True
    assert found["memory_bytes"] > 10**8


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device", "H300"], "Did you mean"),
        (["--micro-batch", "0"], "--micro-batch 0"),
        (["--precision", "fp16"], "--precision 'fp16' is none. Did you mean 'bf16'?"),
        (["--sequence", "5"], "goes with a config file"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], expected: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert expected in refusal(capfd, job_file(tmp_path), *arguments)


def test_a_model_that_cannot_be_traced_is_named_with_its_line(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = job_file(tmp_path, BRANCH)
    line = file.read_text().splitlines().index("        if x.sum() > 0:") + 1
    assert f"{file.name}:{line} needs the value of a tensor" in refusal(capfd, file, "--device", "H200")


def test_a_wrong_device_is_refused_before_torch_is_loaded(tmp_path: Path) -> None:
    script = "import sys; from shoal.cli.main import main; code = main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", script, "fit", str(job_file(tmp_path)), "--device", "H300"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "H300" in done.stderr

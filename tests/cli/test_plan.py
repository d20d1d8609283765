"""`shoal plan`: what it shows, what it writes, what it leaves alone, and what it refuses."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from shoal.cli import train
from shoal.cli.main import main
from shoal.cli.plan_flags import read_plan
from shoal.cli.timeline import draw
from shoal.core.toml import read_toml
from shoal.planner.time.simulate import Piece, simulate_pipeline
from shoal.spec.plan import Plan
from tests.support.files import job_file

GPT = Path(__file__).parents[2] / "examples" / "gpt.py"
H100S = ["--device", "h100", "--nodes", "2", "--per-node", "4", "--link", "ib-ndr"]
BLOCKS = "fields['model'] = lambda: nn.Sequential(*[nn.Linear(512, 512) for _ in range(4)])\n"
BLOCKS += "wide = torch.randn(40, 512)\nfields['data'] = torch.utils.data.TensorDataset(wide, wide.sum(1))\n"


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")


def answer(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["plan", *map(str, arguments)]) == 0
    return capfd.readouterr().out


def figures(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(answer(capfd, *arguments, "--json"))
    return found


def refusal(capfd: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    assert main(["plan", *map(str, arguments)]) == 2
    return capfd.readouterr().err.strip().splitlines()[-1]


def test_the_best_plan_is_written_with_its_prediction(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = figures(capfd, job_file(tmp_path, BLOCKS), *H100S)
    plan = read_toml(Plan, Path("plan.toml"))
    assert plan.predicted is not None
    assert plan.predicted.step_s == found["plans"][0]["time"]["step_s"]
    assert plan.mesh.workers <= 8
    assert plan.checkpoint_s == pytest.approx(found["checkpoints"]["interval_s"], abs=1)
    assert found["written"] == "plan.toml"
    times_s = [each["time"]["step_s"] for each in found["plans"]]
    assert times_s == sorted(times_s)
    assert found["machine"]["nodes"] == 2


def asked(*words: str | Path) -> Plan:
    """Return the plan of `shoal train train.py` with these words."""
    parser = argparse.ArgumentParser()
    train.add_arguments(parser)
    return read_plan(parser.parse_args(["train.py", *map(str, words)]))


def test_the_plan_says_why_it_was_chosen_and_what_was_made_of_it_since(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answer(capfd, job_file(tmp_path, BLOCKS), *H100S)
    file = Path("plan.toml")
    why = read_toml(Plan, file).why
    assert why[0].startswith("The fastest of ")
    assert asked("--plan", file).why == why
    assert asked("--plan", file, "--micro-batch", "2").why == (*why, "Changed by --micro-batch 2.")
    file.write_text(file.read_text().replace("timeout_s = 600.0", "timeout_s = 60.0"))
    assert asked("--plan", file).why == (*why, "plan.toml was edited after `shoal plan` had written it.")


def test_a_plan_of_flags_or_by_hand_says_so() -> None:
    assert asked().why == ("No plan was given, and no number of workers: one worker.",)
    given = ("--workers", "2", "--zero", "3", "--precision", "bf16", "--compile")
    assert asked(*given).why == ("Given by --workers 2 --zero 3 --precision bf16 --compile.",)
    Path("mine.toml").write_text("[mesh]\nreplicate = 2\n")
    assert asked("--plan", "mine.toml").why == ("mine.toml does not say why.",)


def test_the_table_shows_the_parts_of_a_step_and_why_the_others_lost(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = answer(capfd, job_file(tmp_path, BLOCKS), *H100S)
    for word in ("plan 1", "workers", "micro-batch", "step", "compute", "optimizer", "samples/s", "memory", "± 20%"):
        assert word in out
    assert "Others" in out
    assert "A checkpoint every" in out
    assert out.rstrip().endswith("Plan 1 is in plan.toml.")
    assert all(len(line) <= 100 for line in out.splitlines())


def test_another_plan_of_the_table_can_be_picked(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = figures(capfd, job_file(tmp_path, BLOCKS), *H100S, "--pick", "2", "--out", "second.toml")
    predicted = read_toml(Plan, Path("second.toml")).predicted
    assert predicted is not None
    assert predicted.step_s == found["plans"][1]["time"]["step_s"]


def test_an_edited_plan_is_left_alone_and_an_untouched_one_replaced(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job, file = job_file(tmp_path, BLOCKS), Path("plan.toml")
    answer(capfd, job, *H100S)
    assert "Plan 2 is in plan.toml." in answer(capfd, job, *H100S, "--pick", "2"), "as shoal wrote it: replaced"
    edited = file.read_text().replace("timeout_s = 600.0", "timeout_s = 60.0")
    file.write_text(edited)
    assert "plan.toml was edited, and is left as it is. --force overwrites it" in answer(capfd, job, *H100S)
    assert file.read_text() == edited
    assert figures(capfd, job, *H100S)["written"] is None
    assert "Plan 1 is in plan.toml." in answer(capfd, job, *H100S, "--force")
    assert read_toml(Plan, file).timeout_s == 600.0


def test_a_plan_that_a_person_wrote_is_left_alone(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Path("plan.toml").write_text("[mesh]\nreplicate = 2\n")
    answer(capfd, job_file(tmp_path, BLOCKS), *H100S)
    assert Path("plan.toml").read_text() == "[mesh]\nreplicate = 2\n"


def test_a_written_plan_passes_its_own_check(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = job_file(tmp_path, BLOCKS)
    found = figures(capfd, job, *H100S)
    checked = figures(capfd, job, *H100S, "--check", "plan.toml")
    assert checked["plans"][0]["time"]["step_s"] == pytest.approx(found["plans"][0]["time"]["step_s"])
    assert checked["written"] is None


def test_a_plan_edited_into_nonsense_is_refused_with_what_to_write(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = job_file(tmp_path, BLOCKS)

    def checked(text: str) -> str:
        Path("edited.toml").write_text(text)
        return refusal(capfd, job, *H100S, "--check", "edited.toml")

    assert checked("[mesh]\nreplicate = 16\n") == (
        "PlanError: the mesh replicate=16 has 16 workers, and there are 8 devices. "
        "Use a mesh of at most 8, or more nodes."
    )
    assert checked("[batch]\nmicro_batch = 9\n").endswith("Use micro_batch=8 or less.")
    assert checked("[mesh]\npipeline = 5\n[batch]\nmicro_batch = 1\n").endswith("Use pipeline=4 or less.")
    assert checked("zero = 3\n").startswith("PlanError: zero=3 with mesh.shard=1.")
    assert checked("[mesh]\nreplicat = 2\n").endswith("Did you mean 'replicate'?")


def test_a_tensor_degree_must_divide_the_heads(capfd: pytest.CaptureFixture[str]) -> None:
    Path("edited.toml").write_text("[mesh]\ntensor = 4\n")
    sentence = refusal(capfd, GPT, *H100S, "--check", "edited.toml")
    assert sentence == "PlanError: tensor=4 does not divide num_heads=6. Use tensor=1, 2, 3 or 6."


def test_the_cluster_file_in_the_folder_is_used_and_flags_change_it(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    Path("cluster.toml").write_text(
        '[[nodes]]\nhost = "a"\ncores = 8\nmemory_bytes = 1000000000\ndevice = "a100-80"\ndevices = 2\ncount = 1\n'
    )
    job = job_file(tmp_path, BLOCKS)
    assert figures(capfd, job)["machine"] | {"per_node": 2, "nodes": 1} == figures(capfd, job)["machine"]
    changed = figures(capfd, job, "--nodes", "3", "--link", "100Gbps", "--per-node", "4")["machine"]
    assert (changed["nodes"], changed["per_node"], changed["between_bytes_per_s"]) == (3, 4, 12.5e9)


def test_without_a_cluster_this_machine_is_planned_for(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = figures(capfd, job_file(tmp_path))
    assert found["machine"]["nodes"] == 1
    assert found["plans"][0]["plan"]["mesh"]["replicate"] >= 1


def test_a_timeline_of_the_pipeline_is_drawn(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    Path("pipe.toml").write_text("[mesh]\npipeline = 4\n[batch]\nmicro_batch = 2\n")
    out = answer(capfd, job_file(tmp_path, BLOCKS), *H100S, "--check", "pipe.toml", "--timeline")
    rows = [line for line in out.splitlines() if line.startswith("stage ")]
    assert len(rows) == 4
    assert all({"F", "B", "."} <= set(row.split()[-1]) for row in rows)
    Path("pipe.toml").write_text("[mesh]\nreplicate = 2\n")
    out = answer(capfd, job_file(tmp_path, BLOCKS), *H100S, "--check", "pipe.toml", "--timeline")
    assert "This plan has no pipeline to draw." in out


def test_a_timeline_is_as_wide_as_asked_and_says_who_waits() -> None:
    pieces = [Piece(forward_s=1, backward_s=2)] * 2
    text = draw(simulate_pipeline(pieces, stages=2, micro_batches=2, schedule="1f1b"), width=44)
    assert text.splitlines()[:2] == [
        "stage 0 F0FFF1FF........B0BBBBBB....B1BBBBBB",
        "stage 1 ....F0FFB0BBBBBBF1FFB1BBBBBB........",
    ]
    assert "33% of the step" in text


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ([], "ConfigError: say which job to plan: shoal plan train.py (or --calibrate CSV, which needs no job)."),
        (["nowhere.py"], "ConfigError: there is no file nowhere.py."),
        (["JOB", "--pick", "6"], "ConfigError: --pick 6: the table has the plans 1 to 5."),
        (["JOB", "--precision", "bf17"], "ConfigError: --precision 'bf17' is none. Did you mean 'bf16'?"),
        (["JOB", "--batch-size", "0"], "ConfigError: --batch-size 0: give a number from 1 to 1,000,000,000."),
        (["JOB", "--out", "no/plan.toml"], "ConfigError: --out no/plan.toml: there is no folder no."),
        (["JOB", "--mtbf", "often"], "ConfigError: --mtbf 'often' is not a time."),
        (["JOB", "--device", "h1000"], "ConfigError: the catalog has no 'h1000' in devices. Did you mean 'h100'?"),
        (["JOB", "--device", "h100", "--nodes", "2"], "ConfigError: 2 nodes need --link: what joins them, such as"),
        (["JOB", "--nodes", "2"], "ConfigError: --nodes and --link say nothing without a device."),
        (["JOB", "--cluster", "no.toml"], "ConfigError: there is no file no.toml."),
        (["JOB", *H100S, "--sequence", "8"], "ConfigError: --sequence 8 goes with a config file (.json)"),
        (["JOB", "--test", "a.csv"], "ConfigError: --test goes with --calibrate"),
        (["--calibrate", "a.csv"], "ConfigError: there is no a.csv."),
        (["JOB", "--calibrate", "a.csv"], "ConfigError: --calibrate fits to measured steps and needs no job"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    flags: list[str], sentence: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = str(job_file(tmp_path))
    assert refusal(capfd, *[job if flag == "JOB" else flag for flag in flags]).startswith(sentence)


def test_a_model_too_large_for_the_devices_is_refused_with_the_least_it_needs(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    body = "fields['model'] = lambda: nn.Sequential(nn.Linear(5, 200_000), nn.Linear(200_000, 40_000))\n"
    sentence = refusal(capfd, job_file(tmp_path, body), "--device", "rtx-4090", "--per-node", "1")
    assert sentence.startswith("PlanError: no plan fits: a worker needs at least ")


def test_calibrating_keeps_the_fit_and_the_next_plan_uses_it(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    columns = "gpus,global_batch,micro_batch,width,heads,layers,sequence,tensor,data,pipeline,step_ms\n"
    rows = ["8,32,4,1024,16,24,1024,1,8,1,300", "8,32,4,1024,16,24,1024,2,4,1,330", "8,32,2,1024,16,24,1024,1,8,1,320"]
    Path("steps.csv").write_text(columns + "\n".join(rows) + "\n")
    fitted = figures(capfd, "--calibrate", "steps.csv", "--test", "steps.csv")
    assert fitted["written"] == "calibration.toml"
    assert fitted["rows"] == 3
    a100s = ["--device", "a100-80", "--per-node", "4"]
    planned = figures(capfd, job_file(tmp_path, BLOCKS), *a100s)
    assert planned["error"]["step"] == fitted["held_out"]["mean_abs_error"]
    assert "calibration on 3 measured steps" in planned["error"]["source"]
    other = figures(capfd, job_file(tmp_path, BLOCKS), *H100S)
    assert other["error"]["step"] == 0.2, "a fit of A100s says nothing about H100s"

"""People's own loops, and scripts that call shoal themselves: alone, with workers, under torchrun."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.core.errors import ConfigError
from tests.support.files import job_file
from tests.support.jobs import linear

OWN_LOOP = """
if __name__ == "__main__":
    losses = []
    with shoal.start(job, name="mine") as run:
        for batch in run.batches():
            losses.append(run.step(batch))
            run.log(halved=losses[-1] / 2)
    print("losses", *losses)
"""


def python(folder: Path, *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def losses_of(folder: Path) -> list[float]:
    return [
        json.loads(line)["loss"] for line in (folder / "events/rank-0.jsonl").read_text().splitlines() if "loss" in line
    ]


def test_an_own_loop_trains_what_shoals_loop_trains(tmp_path: Path) -> None:
    expected = shoal.train(linear(steps=7), runs=tmp_path, name="ours").losses
    with shoal.start(linear(steps=7), runs=tmp_path, name="own") as run:
        losses = []
        for batch in run.batches():
            losses.append(run.step(batch))
            run.log(loss_squared=losses[-1] ** 2)
        assert run.step_count == 7
    assert losses == list(expected)
    assert run.folder.read_result()["status"] == "done"
    assert run.folder.report_html.exists()
    assert '"loss_squared"' in run.folder.events_of(0).read_text()


def test_a_batch_is_stepped_on_once(tmp_path: Path) -> None:
    def twice() -> None:
        with shoal.start(linear(), runs=tmp_path, name="twice") as run:
            for batch in run.batches():
                run.step(batch)
                run.step(batch)

    with pytest.raises(ConfigError, match="takes each batch"):
        twice()
    assert json.loads((tmp_path / "twice/result.json").read_text())["status"] == "failed"


def test_a_loop_left_early_is_a_run_of_fewer_steps(tmp_path: Path) -> None:
    with shoal.start(linear(steps=7), runs=tmp_path) as run:
        for batch in run.batches():
            run.step(batch)
            if run.step_count == 3:
                break
    assert run.folder.read_result()["status"] == "done"


def test_evaluating_without_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"needs Job\.eval_data"), shoal.start(linear(), runs=tmp_path) as run:
        run.evaluate()


def test_a_plan_for_more_workers_than_were_started_says_how_to_start_them(tmp_path: Path) -> None:
    plan = shoal.Plan(mesh=shoal.Mesh(replicate=2))
    with pytest.raises(ConfigError, match="Start it with: torchrun --nproc-per-node 2"):
        shoal.start(linear(), plan=plan, runs=tmp_path).__enter__()


def test_several_workers_need_the_job_in_the_script(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep it in a variable at the top level of that script"):
        shoal.train(linear(), workers=2, runs=tmp_path)


def test_a_script_starts_its_own_workers(tmp_path: Path) -> None:
    main = """my_job = shoal.Job(**fields)
if __name__ == "__main__":
    shoal.train(my_job, workers=2, name="two")
    shoal.train(my_job, name="one")
"""
    python(tmp_path, str(job_file(tmp_path, job=main)))
    assert losses_of(tmp_path / "runs/two") == pytest.approx(losses_of(tmp_path / "runs/one"), rel=1e-5)
    assert (tmp_path / "runs/two/events/rank-1.jsonl").exists()


def test_an_own_loop_runs_under_torchrun_and_so_does_the_worker_of_a_run(tmp_path: Path) -> None:
    file = job_file(tmp_path, job="job = shoal.Job(**fields)\n" + OWN_LOOP)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    printed = python(tmp_path, *torchrun, str(file))
    lines = [line.split()[1:] for line in printed.splitlines() if line.startswith("losses ")]
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert [float(loss) for loss in lines[0]] == losses_of(tmp_path / "runs/mine")
    for path in (tmp_path / "runs/mine/events").iterdir():
        path.unlink()
    python(tmp_path, *torchrun, "-m", "shoal", "worker", "runs/mine")
    assert losses_of(tmp_path / "runs/mine") == [float(loss) for loss in lines[0]]


def test_shoal_train_under_torchrun_is_one_of_its_workers(tmp_path: Path) -> None:
    file = job_file(tmp_path)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    printed = python(tmp_path, *torchrun, "-m", "shoal", "train", str(file))
    assert printed.count("Trained 6 steps on 2 workers") == 1, "the first worker speaks for all"
    expected = shoal.train(_job(file), runs=tmp_path, name="alone").losses
    assert losses_of(tmp_path / "runs/tiny-1") == pytest.approx(list(expected), rel=1e-5)
    assert json.loads((tmp_path / "runs/tiny-1/result.json").read_text())["status"] == "done"


def _job(file: Path) -> shoal.Job:
    from shoal.training.jobfile import load_job

    return load_job(file)

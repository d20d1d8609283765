"""What the flags of a job on a cluster mean, and what is refused before anything is submitted."""

import argparse
from pathlib import Path

import pytest

from shoal.cli.main import build_parser, main
from shoal.cli.plan_flags import read_plan
from shoal.cli.slurm_flags import Request, layout, read_slurm, set_workers, with_checkpoints
from shoal.core.errors import ConfigError
from shoal.spec.plan import Checkpoints, Plan
from tests.support.files import job_file


def parsed(*flags: str) -> argparse.Namespace:
    return build_parser().parse_args(["train", "f.py", *flags])


def read(*flags: str) -> tuple[Request, Plan]:
    arguments = parsed("--slurm", *flags)
    set_workers(arguments)
    plan = read_plan(arguments)
    return read_slurm(arguments, plan), plan


@pytest.mark.parametrize(
    ("workers", "nodes", "per_node", "expected"),
    [(8, 2, 4, (2, 4)), (8, 2, None, (2, 4)), (8, None, 4, (2, 4)), (8, None, None, (1, 8)), (1, None, None, (1, 1))],
)
def test_nodes_and_workers_on_each_follow_from_one_another(
    workers: int, nodes: int | None, per_node: int | None, expected: tuple[int, int]
) -> None:
    assert layout(workers, nodes, per_node) == expected


def test_a_number_of_nodes_that_does_not_fit_the_plan_is_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"the plan has 8\. Give --nodes 1, 2, 4, 8"):
        layout(8, 3, 4)
    with pytest.raises(ConfigError, match="--nodes 0"):
        layout(8, 0, None)


def test_nodes_and_workers_on_each_say_how_many_workers_there_are() -> None:
    request, plan = read("--nodes", "4", "--per-node", "8", "--time", "4h", "--slurm-option=--qos=x")
    assert (plan.workers, request.nodes, request.per_node) == (32, 4, 8)
    assert (request.time_s, request.notice_s, request.options) == (14400, 60, ("--qos=x",))
    request, plan = read("--mesh", "tensor=2,replicate=2", "--nodes", "2")
    assert (plan.mesh.tensor, request.nodes, request.per_node) == (2, 2, 2)


def test_the_site_says_what_a_worker_has(tmp_path: Path) -> None:
    (tmp_path / "s.toml").write_text("gpus_per_worker = 1\ncpus_per_worker = 8\narray_limit = 9\n")
    request, _ = read("--workers", "2", "--site", str(tmp_path / "s.toml"))
    assert (request.gpus_per_worker, request.cpus_per_worker) == (1, 8)
    request, _ = read("--workers", "2", "--site", str(tmp_path / "s.toml"), "--gpus-per-worker", "0", "--memory", "1GB")
    assert (request.gpus_per_worker, request.memory_bytes) == (0, 10**9)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes", "2"], "--nodes is about jobs on a cluster"),
        (["--detach"], "--detach is about"),
        (["--slurm-option=--x"], "--slurm-option is about"),
        (["--slurm", "--wall-limit", "1h"], "give --time"),
        (["--slurm", "--time", "1m", "--notice", "2m"], "leaves no time to train"),
        (["--slurm", "--time", "soon"], "--time 'soon'"),
        (["--slurm", "--nodes", "3", "--workers", "4"], "the plan has 4"),
    ],
)
def test_what_makes_no_sense_is_refused_in_a_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(["train", str(job_file(tmp_path)), "--runs", str(tmp_path / "runs"), *flags]) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_a_plan_without_checkpoints_gets_some_and_says_so() -> None:
    plan, said = with_checkpoints(Plan(), 4 * 3600)
    assert plan.checkpoint_s == 1800
    assert "Checkpoints every 30 min" in said
    assert with_checkpoints(Plan(), 60)[0].checkpoint_s == 7.5
    own = Plan(checkpoint=Checkpoints(every_steps=5))
    assert with_checkpoints(own, 60) == (own, "")


def test_a_machine_without_slurm_is_told_so(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["train", str(job_file(tmp_path)), "--slurm", "--runs", str(tmp_path / "runs")]) == 69
    assert "login node" in capfd.readouterr().err
    assert not (tmp_path / "runs").exists()

"""The flags of how gradients meet, and what is said where they do not go together."""

import argparse
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.cli.sync_flags import add_sync_flags, asks_for_local_steps, read_sync
from shoal.core.errors import ConfigError, PlanError
from shoal.spec.plan import Mesh, Plan
from shoal.spec.sync import Sync
from tests.support.files import job_file


def read(*words: str, plan: Plan | None = None) -> Plan:
    parser = argparse.ArgumentParser()
    add_sync_flags(parser)
    return read_sync(parser.parse_args(words), plan or Plan())


def test_without_flags_the_plan_stays() -> None:
    plan = Plan(sync=Sync(mode="local", local_steps=7, codec="int8"))
    assert read(plan=plan) == plan


@pytest.mark.parametrize(
    ("words", "sync"),
    [
        ("--sync deadline", Sync(mode="deadline")),
        ("--sync deadline --deadline 0.5 --late drop", Sync(mode="deadline", deadline_s=0.5, late="drop")),
        ("--sync deadline --quorum 3", Sync(mode="deadline", quorum=3)),
        ("--sync local --local-steps 50", Sync(mode="local", local_steps=50)),
        ("--sync local --local-steps auto --outer nesterov", Sync(mode="local", outer="nesterov")),
        (
            "--sync server --servers 2 --server-place processes",
            Sync(mode="server", servers=2, place="processes"),
        ),
        (
            "--sync server --asynchronous --max-staleness 2",
            Sync(mode="server", asynchronous=True, max_staleness=2),
        ),
    ],
)
def test_flags_say_it(words: str, sync: Sync) -> None:
    assert read(*words.split()).sync == sync


def test_another_mode_leaves_the_settings_of_the_planned_one() -> None:
    plan = Plan(sync=Sync(mode="local", local_steps=7, codec="int8"))
    assert read("--sync", "all-reduce", plan=plan).sync == Sync(codec="int8")
    assert read("--outer", "nesterov", plan=plan).sync == Sync(
        mode="local", local_steps=7, codec="int8", outer="nesterov"
    )


def test_live_shares_can_be_switched_off() -> None:
    assert read().batch.live
    assert not read("--no-live-shares").batch.live


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--local-steps 5", "--local-steps goes with --sync local, and this run has --sync all-reduce"),
        ("--sync local --quorum 2", "--quorum goes with --sync deadline, and this run has --sync local"),
        ("--sync deadline --asynchronous", "--asynchronous goes with --sync server"),
        ("--sync local --local-steps 0", "give a number of steps from 1 on, or auto"),
        ("--sync local --local-steps many", "give a number of steps from 1 on, or auto"),
        ("--sync deadline --deadline -1", "none of them is below 0"),
    ],
)
def test_what_does_not_go_together_is_said(words: str, said: str) -> None:
    with pytest.raises((ConfigError, PlanError), match=said):
        read(*words.split())


def test_auto_is_for_the_planner() -> None:
    parser = argparse.ArgumentParser()
    add_sync_flags(parser)
    assert asks_for_local_steps(parser.parse_args(["--sync", "local", "--local-steps", "auto"]))
    assert not asks_for_local_steps(parser.parse_args(["--sync", "local", "--local-steps", "3"]))


def test_the_planner_says_how_many_local_steps_and_why(tmp_path: Path) -> None:
    from shoal.training.jobfile import load_job
    from shoal.training.local_steps import with_local_steps

    said: list[str] = []
    plan = Plan(mesh=Mesh(replicate=2), sync=Sync(mode="local"))
    chosen = with_local_steps(load_job(job_file(tmp_path)), plan, cluster=None, say=said.append)
    assert chosen.sync.local_steps >= 1
    assert f"{chosen.sync.local_steps} local step" in said[-1]
    assert "a meeting takes" in said[-1]


def test_verify_refuses_what_is_meant_to_be_another_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = job_file(tmp_path)
    Path("plan.toml").write_text('[mesh]\nreplicate = 2\n[sync]\nmode = "local"\nlocal_steps = 4\n')
    assert main(["verify", str(file), "--plan", "plan.toml"]) == 2
    assert "trains otherwise than one process does" in capsys.readouterr().err

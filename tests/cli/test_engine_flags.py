"""The flags that name an engine, and what is said where they do not go together."""

import argparse
from pathlib import Path

import pytest

from shoal.cli.elastic_flags import add_elastic_flags, read_elastic
from shoal.cli.main import main
from shoal.cli.plan_flags import add_plan_flags, read_plan
from shoal.core.errors import PlanError
from shoal.core.toml import read_toml
from shoal.spec.on_loss import OnLoss
from shoal.spec.plan import Mesh, Plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "deepspeed.toml"


def plan_of(words: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_plan_flags(parser)
    add_elastic_flags(parser)
    arguments = parser.parse_args(words.split())
    return read_elastic(arguments, read_plan(arguments))


def test_zero_shards_over_the_workers_on_both_engines() -> None:
    assert plan_of("--zero 2 --workers 4") == Plan(zero=2, mesh=Mesh(shard=4))
    deepspeed = Plan(engine="deepspeed", zero=2, mesh=Mesh(shard=4))
    assert plan_of("--engine deepspeed --zero 2 --workers 4") == deepspeed
    alone = Plan(engine="deepspeed", zero=2, offload=True)
    assert plan_of("--engine deepspeed --zero 2 --workers 1 --offload") == alone


def test_flags_override_the_example_plan() -> None:
    plan = read_toml(Plan, EXAMPLE)
    assert (plan.engine, plan.zero, plan.workers) == ("deepspeed", 2, 2)
    other = plan_of(f"--plan {EXAMPLE} --workers 3 --zero 3")
    assert (other.engine, other.zero, other.mesh) == ("deepspeed", 3, Mesh(shard=3))
    assert plan_of(f"--plan {EXAMPLE} --workers 1").zero == 2
    assert plan_of(f"--plan {EXAMPLE} --engine torch").engine == "torch"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("", OnLoss()),
        ("--on-loss go-on --restarts 0", OnLoss(restarts=0)),
        ("--on-loss replan", OnLoss(replan=True)),
        ("--on-loss stop", OnLoss(go_on=False)),
    ],
)
def test_what_is_done_at_a_loss(words: str, expected: OnLoss) -> None:
    assert plan_of(words).on_loss == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--engine deepspeed --workers 2", "zero=0: DeepSpeed is here for ZeRO"),
        ("--engine deepsped --zero 1 --workers 2", "Did you mean 'deepspeed'"),
        ("--offload --workers 2", "Use engine='deepspeed'"),
        ("--engine deepspeed --zero 1 --workers 2 --on-loss go-on", "--resume"),
        ("--engine deepspeed --zero 1 --workers 2 --on-loss replan", "--resume"),
        ("--engine deepspeed --zero 1 --workers 2 --restarts 2", "Leave --on-loss and --restarts out"),
    ],
)
def test_what_does_not_go_together_is_refused(words: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        plan_of(words)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--workers 1", "ZeRO needs at least 2 workers"),
        ("--zero 0", "write stages from 1 to 3"),
        ("--rounds 0", "--rounds 0"),
    ],
)
def test_the_bench_refuses_what_it_cannot_measure(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engines", str(EXAMPLE.parent / "gpt.py"), *words.split()]) == 2
    assert said in capsys.readouterr().err

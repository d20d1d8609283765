import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from shoal.core.errors import ConfigError
from shoal.core.toml import parse_toml, read_toml, write_toml
from shoal.spec.plan import Batch, Mesh, Plan, Predicted


def test_a_plan_written_and_read_again_is_the_same_plan(tmp_path: Path) -> None:
    predicted = Predicted(step_s=0.5, comm_s=0.1, samples_per_s=16.0, peak_bytes=(5, 6))
    plan = Plan(mesh=Mesh(replicate=2), batch=Batch(micro_batch=3, shares=(0.25, 0.75)), predicted=predicted)
    write_toml(tmp_path / "plan.toml", plan)
    assert read_toml(Plan, tmp_path / "plan.toml") == plan


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("precison = 'bf16'", "unknown key 'precison' in plan.toml. Did you mean 'precision'?"),
        ("[batch]\nmicro_bach = 4", "unknown key 'micro_bach' in plan.toml [batch]. Did you mean 'micro_batch'?"),
        ("[batch]\nmicro_batch = 'four'", "'micro_batch' in plan.toml [batch] must be a whole number, not 'four'."),
        ("[batch]\nmicro_batch = true", "'micro_batch' in plan.toml [batch] must be a whole number, not True."),
        ("batch = 4", "'batch' in plan.toml must be a table, not 4."),
        ("[batch]\nshares = [1, 'x']", "'shares' in plan.toml [batch] must be a number, not 'x'."),
        ("[mesh", "plan.toml is not valid TOML"),
    ],
)
def test_a_wrong_plan_file_gets_one_clear_sentence(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        parse_toml(Plan, text, name="plan.toml")


def test_a_file_that_lacks_a_key_says_which() -> None:
    @dataclass(frozen=True)
    class Thing:
        size_bytes: int

    with pytest.raises(ConfigError, match=r"thing.toml lacks the key 'size_bytes'\."):
        parse_toml(Thing, "", name="thing.toml")


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"there is no file nowhere/plan.toml"):
        read_toml(Plan, Path("nowhere/plan.toml"))


def test_a_word_that_is_none_of_those_allowed_is_answered_with_them() -> None:
    @dataclass(frozen=True)
    class Thing:
        kind: Literal["round", "square"]

    assert parse_toml(Thing, 'kind = "round"', name="thing.toml").kind == "round"
    with pytest.raises(ConfigError, match=r"'kind' in thing.toml must be one of 'round', 'square', not 'oval'\."):
        parse_toml(Thing, 'kind = "oval"', name="thing.toml")

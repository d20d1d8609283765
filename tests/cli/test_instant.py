"""What must answer at once does not import torch. How long it takes: `shoal bench start RUN`."""

import subprocess
import sys
from pathlib import Path

import pytest

from shoal.cli.main import VERBS, build_parser

SCRIPT = """
import sys
from shoal.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as error:
    code = error.code
heavy = {"torch", "numpy", "plotly", "tensorboardX"} & set(sys.modules)
print("heavy:", heavy, "code:", code)
"""


def answer(*arguments: str) -> str:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()[-1]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *[[verb, "--help"] for verb in VERBS]], ids=str)
def test_help_and_version_answer_without_torch(arguments: list[str]) -> None:
    assert answer(*arguments) == "heavy: set() code: 0"


def test_a_wrong_config_is_refused_without_torch(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text("[batch]\nmicro_bach = 4\n")
    assert answer("train", "job.py", "--plan", str(plan)) == "heavy: set() code: 2"
    assert answer("train", "job.py", "--shares", ".5,.4") == "heavy: set() code: 2"
    assert answer("train", str(tmp_path / "nowhere.py")) == "heavy: set() code: 2"
    assert answer("report", str(tmp_path)) == "heavy: set() code: 2"


def test_every_verb_for_people_has_an_example_in_its_help() -> None:
    for name, verb in VERBS.items():
        if verb.ABOUT:
            assert "example:" in verb.EXAMPLE
            assert f"shoal {name} " in verb.EXAMPLE
            assert name in build_parser().format_help()

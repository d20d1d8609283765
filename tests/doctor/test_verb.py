"""`shoal doctor` as people call it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.doctor.examine import all_checks
from shoal.doctor.packages import _OURS, PURPOSES

ROOT = Path(__file__).parents[2]
INSTALL = ROOT / "docs" / "install.md"


def test_a_healthy_machine_can_train_and_the_answer_is_one_json_object(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = main(["doctor", "--json"])
    said = json.loads(capsys.readouterr().out)
    levels = {each["subject"]: each["level"] for each in said["findings"]}
    assert (code, said["problems"]) == (0, 0), said
    for subject in ("Python", "packages", "torch", "process group", "C library", "ports", "storage", "clock"):
        assert levels[subject] == "ok", said
    assert said["warnings"] == sum(each["level"] == "warning" for each in said["findings"])
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"
    assert levels.keys() <= set(shown_subjects()), "docs/install.md shows others"


def test_a_problem_is_shown_with_its_remedy_and_ends_with_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": "29500", "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)
    assert main(["doctor", "--runs", str(tmp_path / "runs")]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM variables       RANK=0, WORLD_SIZE=2, MASTER_PORT=29500, but no launcher started this" in said
    assert "unset RANK WORLD_SIZE MASTER_PORT" in said
    assert "There is 1 problem that breaks training" in said
    assert not (tmp_path / "runs").exists()


def test_it_tells_what_is_missing_where_rich_itself_is(tmp_path: Path) -> None:
    (tmp_path / "rich.py").write_text("raise ImportError('no rich')")
    script = """
import sys
from shoal.cli.doctor import _shown
from shoal.doctor.finding import problem
sys.path.insert(0, sys.argv[1])
list(_shown(iter([problem("packages", "rich: missing", "pip install 'rich>=13.9'")])))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "PROBLEM packages: rich: missing\n        pip install 'rich>=13.9'\n"


def shown_subjects() -> list[str]:
    """Return what is looked at, as docs/install.md shows it."""
    page = INSTALL.read_text()
    return [found.rstrip() for found in re.findall(r"^(?:ok|warning|PROBLEM) +(.{15}) ", page, re.MULTILINE)]


def test_the_page_shows_every_check_in_its_order_and_as_many_extras_as_there_are() -> None:
    checked = list(dict.fromkeys(check.subject for check in all_checks(Path("runs"), {})))
    assert [subject for subject in dict.fromkeys(shown_subjects()) if subject in checked] == checked
    said = re.search(r"extras +(\d+) of (\d+) are installed: (.*?)\n +for ", INSTALL.read_text(), re.DOTALL)
    assert said is not None
    assert int(said[1]) == len(said[3].split(","))
    assert int(said[2]) == len(PURPOSES)


def test_every_extra_has_its_purpose_here_and_its_line_in_the_documentation() -> None:
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    page = INSTALL.read_text()
    assert set(PURPOSES) == extras - set(_OURS), "shoal/doctor/packages.py: PURPOSES"
    for extra in extras:
        assert f"| `{extra}` |" in page, f"docs/install.md has no line of the extra {extra}"

"""The shells really complete: each is asked what follows."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.completion import SHELLS
from shoal.cli.main import VERBS, main
from tests.support.needs import need, why_no
from tests.support.shells import bash_offers, fish_offers, zsh_completes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a job file, a plan and a run."""
    (tmp_path / "runs/gpt-1").mkdir(parents=True)
    (tmp_path / "runs/gpt-1/plan.toml").touch()
    (tmp_path / "my data").mkdir()
    for name in ("gpt.py", "fast.toml", "notes.txt"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.fixture
def script(folder: Path, capsys: pytest.CaptureFixture[str]) -> Callable[[str], Path]:
    def write(shell: str) -> Path:
        need(why_no((shell,), (shell,)))
        assert main(["completion", shell]) == 0
        (folder / "script").write_text(capsys.readouterr().out)
        return folder

    return write


VISIBLE = sorted(name for name, verb in VERBS.items() if verb.ABOUT)


def test_bash_completes_verbs_flags_choices_files_and_run_folders(script: Callable[[str], Path]) -> None:
    asked = {
        "shoal ''": VISIBLE,
        "shoal tr": ["train"],
        "shoal train --pl": ["--plan"],
        "shoal train ''": ["gpt.py", "my data", "runs"],
        "shoal train gpt.py --plan ''": ["fast.toml", "my data", "runs"],
        "shoal train --plan fast.toml g": ["gpt.py"],
        "shoal train --sync ''": ["all-reduce", "deadline", "local", "server"],
        "shoal train --sync = l": ["local"],
        "shoal train --asynchronous g": ["gpt.py"],
        "shoal report r": ["runs", "runs/gpt-1"],
        "shoal report runs/gpt-1 runs/": ["runs/gpt-1"],
        "shoal export runs/gpt-1 m": ["my data"],
        "shoal bench sta": ["start"],
        "shoal bench step --wo": ["--workers"],
        "shoal fit gpt.py --device H": ["H100", "H200"],
        "shoal train --workers ''": [],
        "shoal completion ''": sorted(SHELLS),
    }
    assert dict(zip(asked, bash_offers(script("bash"), *asked), strict=True)) == asked


def test_bash_is_told_whom_the_function_serves(script: Callable[[str], Path]) -> None:
    import subprocess

    folder = script("bash")
    said = subprocess.run(
        ["bash", "--norc", "-c", "source ./script; complete -p shoal"],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert said.stdout == "complete -F _shoal shoal\n"


def test_zsh_completes_verbs_flags_choices_files_and_run_folders(script: Callable[[str], Path]) -> None:
    asked = {
        "shoal rep": "shoal report ",
        "shoal train --pla": "shoal train --plan ",
        "shoal train --plan f": "shoal train --plan fast.toml ",
        "shoal train --sync l": "shoal train --sync local ",
        "shoal train g": "shoal train gpt.py ",
        "shoal watch runs/g": "shoal watch runs/gpt-1",
        "shoal bench sta": "shoal bench start ",
        "shoal bench step --ro": "shoal bench step --rounds ",
        "shoal export runs/gpt-1 m": "shoal export runs/gpt-1 my\\ data/",
        "shoal completion f": "shoal completion fish ",
    }
    completed = zsh_completes(script("zsh"), *asked)
    assert [line.rstrip("/ ") for line in completed] == [line.rstrip("/ ") for line in asked.values()]


def test_fish_completes_verbs_flags_choices_files_and_run_folders(script: Callable[[str], Path]) -> None:
    asked = {
        "shoal ": VISIBLE,
        "shoal train --pl": ["--plan"],
        "shoal train g": ["gpt.py"],
        "shoal train --plan=f": ["--plan=fast.toml"],
        "shoal train --sync ": ["all-reduce", "deadline", "local", "server"],
        "shoal report ru": ["runs/", "runs/gpt-1"],
        "shoal bench sta": ["start"],
        "shoal bench step --wo": ["--workers"],
        "shoal fit gpt.py --device H": ["H100", "H200"],
        "shoal completion ": sorted(SHELLS),
    }
    assert dict(zip(asked, fish_offers(script("fish"), *asked), strict=True)) == asked


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_is_also_given_as_json(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["shell"] == shell
    assert "shoal" in said["script"]


def test_what_is_not_for_people_is_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    main(["completion", "bash"])
    script = capsys.readouterr().out
    assert "nursery" not in script
    assert "--parent" not in script


def test_bash_itself_is_here() -> None:
    assert shutil.which("bash"), "without it, nothing of the above was tested"

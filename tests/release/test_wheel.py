"""What is released: built without a network, looked into, installed into an environment of its own, and used there."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import shoal
from tests.support.wheel import (
    ROOT,
    build,
    call,
    link_light,
    refuse_without_extras,
    sdist_faults,
    try_out,
    wheel_faults,
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return build(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def command(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command `shoal` of an environment with the wheel and the light dependencies alone: no extra is there."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    python = folder / "bin/python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*pip, "--disable-pip-version-check", str(built[1])], timeout=120, check=True)
    own = Path(
        subprocess.check_output([python, "-c", "import site; print(*site.getsitepackages())"], text=True).strip()
    )
    link_light(own)
    return folder / "bin/shoal"


def test_the_sdist_has_all_that_a_wheel_is_built_from(built: tuple[Path, Path]) -> None:
    assert sdist_faults(built[0]) == []


def test_the_wheel_has_the_package_the_catalog_and_the_libraries_and_nothing_else(built: tuple[Path, Path]) -> None:
    assert wheel_faults(built[1]) == []


def test_the_installed_wheel_checks_itself_and_trains(command: Path, tmp_path: Path) -> None:
    version = try_out(command, tmp_path)
    assert version.startswith(f"shoal {shoal.__version__} (torch 2.")


def test_without_the_extras_what_needs_one_says_which(command: Path, tmp_path: Path) -> None:
    assert refuse_without_extras(command, tmp_path) == ["hdf5", "hf", "sweep"]


def test_the_installed_command_refuses_with_exit_code_2(command: Path, tmp_path: Path) -> None:
    assert "ConfigError" in call(command, tmp_path, "report", "nowhere", code=2)


def test_the_changelog_begins_with_this_version() -> None:
    entries = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert entries[0] == shoal.__version__

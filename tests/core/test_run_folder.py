from pathlib import Path

import pytest

from shoal.core.errors import ConfigError
from shoal.core.run_folder import RunFolder


def test_runs_without_a_name_are_numbered(tmp_path: Path) -> None:
    names = [RunFolder.create(tmp_path / "runs", None, "gpt").name for _ in range(3)]
    assert names == ["gpt-1", "gpt-2", "gpt-3"]


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, "mine", "gpt")
    with pytest.raises(ConfigError, match=r"mine exists already\. Choose another --name, or remove it"):
        RunFolder.create(tmp_path, "mine", "gpt")


@pytest.mark.parametrize("name", ["", "../up", "a/b", "/root"])
def test_a_name_that_is_a_path_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="one folder name"):
        RunFolder.create(tmp_path, name, "gpt")


@pytest.mark.parametrize("name", ["with space", 'quo"te', "grün ☃", "-rf"])
def test_hostile_names_are_just_names(name: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, name, "gpt")
    folder.write_result("done")
    assert folder.read_result()["status"] == "done"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run folder"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("content", [None, "", "{half", "[]"])
def test_a_run_without_a_readable_result_is_unfinished(content: str | None, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "cut", "gpt")
    if content is not None:
        folder.result_json.write_text(content)
    assert folder.read_result()["status"] == "unfinished"

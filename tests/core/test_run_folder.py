import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shoal.core import run_folder
from shoal.core.errors import ConfigError
from shoal.core.files import write_whole
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


class Killed(BaseException):
    """Stands for the end of the process."""


def logged(runs: Path, name: str) -> RunFolder:
    """Return a run of three workers that have come to step 4, and have said so."""
    folder = RunFolder.create(runs, name, "gpt")
    for rank in range(3):
        lines = [f'{{"kind": "step", "step": {step}, "rank": {rank}}}\n' for step in range(1, 5)]
        folder.events_of(rank).write_text('{"kind": "start"}\n' + "".join(lines) + '{"kind": "error"}\n')
    folder.write_result("stopped")
    return folder


def logs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("rank-*.jsonl")}


def test_a_run_that_is_gone_on_with_keeps_what_is_said_of_the_steps_before(tmp_path: Path) -> None:
    folder = logged(tmp_path, "r")
    before = logs(folder.events)
    folder.begin_attempt(step=2, workers=2)
    assert logs(folder.events / "attempt-1") == before
    assert {name: text.count('step", ') for name, text in logs(folder.events).items()} == {
        "rank-0.jsonl": 2,
        "rank-1.jsonl": 2,
    }
    assert not folder.result_json.exists()


def test_where_files_have_one_name_the_events_put_aside_are_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuses)
    folder = logged(tmp_path, "r")
    before = logs(folder.events)
    folder.begin_attempt(step=2, workers=3)
    assert logs(folder.events / "attempt-1") == before


def test_whoever_is_killed_anywhere_while_a_run_is_begun_anew_has_lost_nothing(tmp_path: Path) -> None:
    undisturbed = logged(tmp_path, "undisturbed")
    before = logs(undisturbed.events)
    undisturbed.begin_attempt(step=2, workers=2)
    for moment in itertools.count():
        folder = logged(tmp_path, f"killed-{moment}")
        if not is_killed(lambda run=folder: run.begin_attempt(step=2, workers=2), after=moment):  # type: ignore[misc]
            break
        folder.begin_attempt(step=2, workers=2)
        assert logs(folder.events) == logs(undisturbed.events)
        assert logs(folder.events / "attempt-1") == before
    assert moment > 6


def is_killed(call: Callable[[], None], *, after: int) -> bool:
    """Return whether `call` does more than `after` things to files; it is killed in the next one."""
    left = after

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **options: Any) -> Any:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            return function(*arguments, **options)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        for name in ("hardlink_to", "rename", "replace", "unlink"):
            patch.setattr(Path, name, counted(getattr(Path, name)))
        patch.setattr(run_folder, "write_whole", counted(write_whole))
        try:
            call()
        except Killed:
            return True
    return False

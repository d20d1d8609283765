"""`shoal report`, as the command line runs it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.cli.main import main
from shoal.core.run_folder import RunFolder


def test_the_page_is_written_and_its_path_said(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path)]) == 0
    assert run.report_html.is_file()
    assert str(run.report_html) in capsys.readouterr().out.replace("\n", "")


def test_the_terminal_shows_advice_with_its_flags(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "Next Worker 1 waits 30% of each step for worker 0" in out
    assert "Try: --shares 0.375,0.625" in out


def test_json_is_one_object_and_nothing_else(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 12


def test_json_has_the_verdict_and_the_advice(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"].startswith("Worker 1 waits 30% of each step for worker 0")
    (advice,) = told["advice"]
    assert advice["sentence"] == told["verdict"]
    assert (advice["bottleneck"], advice["flags"]) == ("straggler", "--shares 0.375,0.625")
    assert advice["change"] == {"batch.shares": [0.375, 0.625]}
    assert advice["predicted_gain"] > 1.05


def test_json_of_a_run_that_needs_nothing_has_its_headline_and_no_advice(
    tmp_path: Path, make_run: Callable[..., RunFolder], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(make_run(tmp_path, workers=1).path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"].startswith("Trained 12 steps on 1 worker at 400 tokens/s")
    assert told["advice"] == []


def test_open_shows_the_page_in_the_browser(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def note(address: str) -> bool:
        shown.append(address)
        return True

    monkeypatch.setattr("webbrowser.open", note)
    assert main(["report", str(run.path), "--open"]) == 0
    assert shown == [run.report_html.as_uri()]


def test_where_there_is_no_browser_the_path_is_said(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    assert main(["report", str(run.path), "--open"]) == 2
    assert f"Open {run.report_html} yourself" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.parametrize("as_json", [False, True])
def test_where_the_page_cannot_be_written_the_summary_is_shown_all_the_same(
    run: RunFolder, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run.report_html.mkdir()  # root may write into any folder, so that its own rights stop no test
    assert main(["report", str(run.path), "--open", *["--json"] * as_json]) == 2
    said = capsys.readouterr()
    assert f"The page {run.report_html} could not be written: Is a directory." in said.err
    assert json.loads(said.out)["steps"] == 12 if as_json else "Try: --shares 0.375,0.625" in said.out
    assert [path.name for path in run.path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("as_json", [False, True])
def test_where_a_comparison_cannot_be_written_it_is_shown_all_the_same(
    run: RunFolder, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    page = run.path / f"compared-with-{run.name}.html"
    page.mkdir()
    assert main(["report", str(run.path), str(run.path), *["--json"] * as_json]) == 2
    said = capsys.readouterr()
    assert f"The page {page} could not be written: Is a directory." in said.err
    assert json.loads(said.out)["page"] is None if as_json else "Page" not in said.out and "tokens/s" in said.out


@pytest.mark.parametrize("which", [0, 1])
def test_what_is_no_run_is_a_mistake_that_is_named(
    run: RunFolder, tmp_path: Path, which: int, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(run.path), str(run.path)]
    paths[which] = str(tmp_path / "nothing")
    assert main(["report", *paths]) == 2
    assert "nothing is not a run folder" in capsys.readouterr().err.replace("\n", "")

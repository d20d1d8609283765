"""Tests that cannot run here are skipped with a sentence, and fail with it where all must run."""

import os
from pathlib import Path

import pytest

from tests.support.needs import MUST_RUN, need, why_no

ROOT = Path(__file__).parents[1]


def test_what_cannot_run_is_skipped_unless_everything_must_run(monkeypatch: pytest.MonkeyPatch) -> None:
    need(None)
    monkeypatch.delenv(MUST_RUN, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no Slurm here"):
        need("there is no Slurm here")
    monkeypatch.setenv(MUST_RUN, "1")
    need(None)
    with pytest.raises(pytest.fail.Exception, match="no Slurm here; SHOAL_TESTS_MUST_RUN is set"):
        need("there is no Slurm here")


def test_in_ci_everything_must_run() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert f"export {MUST_RUN}=1" in lines
    assert lines[-1] == "make test"


@pytest.fixture
def apt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for apt-get that notes what it is asked, and fails as often as there are lines in `failures`."""
    script = (
        f'#!/bin/bash\ncd "{tmp_path}"\necho "${{@: -1}}" >>asked\n'
        'if [ -s failures ]; then sed -i 1d failures; echo "E: no answer" >&2; exit 100; fi\n'
    )
    (tmp_path / "apt-get").write_text(script)
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("tests.support.needs.os.geteuid", lambda: 0)
    return tmp_path


def test_a_package_that_could_not_be_installed_is_tried_again(apt: Path) -> None:
    (apt / "failures").write_text("1\n2\n")
    assert why_no(("no-such-program-1",), ("package",)) is None
    assert (apt / "asked").read_text().split() == ["update", "update", "update", "package"]


def test_a_package_that_cannot_be_installed_is_given_up_and_named(apt: Path) -> None:
    (apt / "failures").write_text("1\n" * 10)
    said = why_no(("no-such-program-2",), ("one", "two"))
    assert said == "one and two could not be installed in 3 tries: E: no answer"


def test_without_root_nothing_is_installed(apt: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.needs.os.geteuid", lambda: 1000)
    assert "only root can install" in (why_no(("no-such-program-3", "bash"), ("one",)) or "")
    assert why_no(("bash",), ("bash",)) is None
    assert not (apt / "asked").exists()

"""How a map goes: a bar with the time left on a terminal, plain lines elsewhere, nothing where nobody looks."""

import io

import pytest
from rich.console import Console

from shoal.tasks import progress
from shoal.tasks.progress import Progress


def shown(*, is_terminal: bool) -> str:
    """Return what 10 tasks show, of which one fails."""
    said = io.StringIO()
    with Progress(10, Console(file=said, force_terminal=is_terminal, width=100)) as bar:
        for done in range(11):
            bar.update(done, failed=int(done > 5), more="; jobs: 2 running")
        bar.say("a line [with brackets]")
    return said.getvalue()


def test_a_terminal_has_a_bar() -> None:
    said = shown(is_terminal=True)
    assert "10 of 10, 1 failed; jobs: 2 running" in said
    assert "a line [with brackets]" in said


def test_elsewhere_there_are_lines_with_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_LINE_S", -1.0)
    lines = shown(is_terminal=False).splitlines()
    assert lines[0] == "tasks: 0 of 10; jobs: 2 running"
    assert lines[6].startswith("tasks: 6 of 10, 1 failed; jobs: 2 running, ")
    assert lines[6].endswith(" left")


def test_nobody_is_told_without_a_console() -> None:
    with Progress(3, None) as bar:
        bar.update(1)
        bar.say("nothing")

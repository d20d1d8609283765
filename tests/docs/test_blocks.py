"""The blocks of pages are found and counted; none is left out in silence, and a planted mistake is seen."""

import re
import shlex
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks_of, pages
from tests.docs.check import mistake_in
from tests.docs.commands import PROGRAMS, Command, commands_of
from tests.docs.given import Given
from tests.docs.outputs import first_difference
from tests.docs.page import SHOWN_ONLY, Player
from tests.docs.reasons import why_not


def test_every_fence_of_every_page_is_a_block_that_is_run_checked_or_gives_a_reason() -> None:
    found = {"run": 0, "text": 0, "not run": 0}
    for page in pages():
        fences = re.findall(r"^ *```", (ROOT / page).read_text(), re.MULTILINE)
        blocks = blocks_of(page)
        assert len(fences) == 2 * len(blocks), page
        for block in blocks:
            if "not-run" in block.attributes:
                assert len(block.attributes["not-run"]) > 10, f"{block.where}: is that a reason?"
                found["not run"] += 1
            else:
                found["text" if block.language in SHOWN_ONLY else "run"] += 1
    print(found)
    assert found["run"] > 5 * found["not run"]


def test_what_only_shows_something_has_no_command_in_it() -> None:
    hidden = [
        block.where
        for page in pages()
        for block in blocks_of(page)
        if block.language in SHOWN_ONLY and re.search(r"^\$? ?shoal [a-z]+\b", block.text, re.MULTILINE)
    ]
    assert hidden == []


def test_no_command_is_hidden_in_a_block_without_a_fence() -> None:
    """Four spaces make a block of code as well, which nothing here would run."""
    begins = re.compile(rf"^(?: {{4,}}|\t)\s*(?:\$ )?(?:{'|'.join(PROGRAMS)}) ", re.MULTILINE)
    hidden = {page: found for page in pages() if (found := begins.findall(_without_fences(page)))}
    assert hidden == {}


def test_every_command_that_is_not_run_has_arguments_that_parse() -> None:
    commands = [
        command
        for page in pages()
        for block in blocks_of(page)
        if block.language == "" and not block.text.startswith(">>> ")
        for command in commands_of(block)
    ]
    not_run = [command for command in commands if _reason(command)]
    for command in not_run:
        print(f"not run: {command.where} ({_reason(command)})")
    assert {command.where: mistake for command in not_run if (mistake := mistake_in(command.words))} == {}
    assert len(not_run) < len(commands) / 3


def _reason(command: Command) -> str:
    """Return why a command is not run: its block says so, or one of reasons.py. Empty: it is."""
    return command.block.attributes.get("not-run") or why_not(str(command), full_size=True) or ""


def _without_fences(page: str) -> str:
    return re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)


def test_commands_in_the_text_of_pages_parse() -> None:
    """A flag may be named without its value, and a verb without its file."""
    wrong = {}
    for page in pages():
        for span in re.findall(rf"`((?:{'|'.join(PROGRAMS)}) [^`]+)`", _without_fences(page)):
            if "..." not in span and not re.search(r"\b[A-Z]{3,}\b", span):  # RUN, FILE: of yours
                wrong[page, span] = mistake_in(tuple(shlex.split(re.sub(r"\[(--[^]]*)\]", r"\1", span))))
    named_alone = re.compile("arguments are required|expected (one|at least one) argument")
    assert len(wrong) > 100
    assert {where: mistake for where, mistake in wrong.items() if mistake and not named_alone.search(mistake)} == {}


def test_commands_are_what_stands_before_two_spaces() -> None:
    text = "```\nshoal train t.py --workers 2    two;  or so\n      many\nshoal attach r  see  shoal cancel r\n```\n"
    (block,) = blocks_of("p.md", text)
    assert [str(command) for command in commands_of(block)] == [
        "shoal train t.py --workers 2",
        "shoal attach r",
        "shoal cancel r",
    ]
    assert commands_of(block)[2].where == "p.md:4: shoal cancel r"


def test_a_flag_behind_two_spaces_is_not_lost() -> None:
    (block,) = blocks_of("p.md", "```\nshoal train t.py  --workers 2    with two\n```\n")
    with pytest.raises(ValueError, match="a flag follows"):
        commands_of(block)


def test_a_session_has_what_its_commands_print() -> None:
    (block,) = blocks_of("p.md", "```\n$ shoal cost x \\\n     --bytes 1\nfirst\n$ shoal watch &\n```\n")
    first, second = commands_of(block)
    assert first.words == ("shoal", "cost", "x", "--bytes", "1")
    assert first.shown == ("first",)
    assert second.in_background


def test_a_block_may_have_a_file_a_reason_and_what_is_run_before() -> None:
    (block,) = blocks_of("p.md", '<!-- before\nx = 1\n-->\n```python file="a.py"\nprint(x)\n```\n')
    assert block == Block("p.md", 5, "python", "print(x)\n", "x = 1\n", {"file": "a.py"})
    with pytest.raises(ValueError, match="notrun"):
        blocks_of("p.md", '```python notrun="no"\n```\n')
    with pytest.raises(ValueError, match="does not end"):
        blocks_of("p.md", "```python\n")


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("```\nshoal train train.py --wokers 2\n```\n", "--wokers"),
        ("```\nshoal fly train.py\n```\n", "fly"),
        ("```\nmake breakfast\n```\n", "breakfast"),
        ("```\npip install 'shoal[moon]'\n```\n", "moon"),
        ("```\npython benchmarks/none.py\n```\n", "none.py"),
        ("```\nshoal train examples/none.py\n```\n", "none.py"),
        ('``` not-run="it is planted"\nshoal train train.py\nshoal train train.py --wrokers 2\n```\n', "wrokers"),
        ('```python not-run="it is planted"\nx = (\n```\n', "no Python"),
        ('```python not-run="it is planted"\nshoal.trian(job)\n```\n', "trian"),
        ('```python not-run="it is planted"\nshoal.Job(modle=None, **rest)\n```\n', "modle"),
        ('```python not-run="it is planted"\nfrom shoal.lightning import Strategy\n```\n', "has no Strategy"),
        ("```toml\n# plan.toml\nzreo = 3\n```\n", "zreo"),
        ("```python\n1 / 0\n```\n", "ZeroDivisionError"),
        ("```\n>>> 1 + 1\nfour\n```\n", "prints"),
        ("```\n$ shoal cost broadcast --bytes 5MB --workers 8 --link 1MB/s\nnothing of the kind\n```\n", "it prints"),
        ("```rust\nfn main() {}\n```\n", "rust"),
    ],
)
def test_a_planted_mistake_is_seen(text: str, wrong: str, tmp_path: Path) -> None:
    player = Player(tmp_path, Given(tmp_path / "given"), already=set(), full_size=False)
    (tmp_path / "cluster.toml").write_text("")
    (played,) = player.play(blocks_of("p.md", text))
    assert wrong in played.wrong


def test_what_is_shown_may_have_other_numbers_and_leave_lines_out() -> None:
    printed = "Trained 48 steps at 1,234 samples/s\nnoise\n step   1.2 ms  ███\nend\n"
    assert first_difference(("Trained 12 steps at 99 samples/s", "...", " step  930 us  █", "end"), printed) == ""
    assert first_difference(("Trained 12 epochs at 99 samples/s",), printed) != ""
    assert first_difference(("end", "...", "noise"), printed) != ""

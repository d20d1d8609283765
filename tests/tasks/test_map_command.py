"""`shoal map` on the command line: what items may be, what is printed, and the exit codes."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.main import main
from shoal.cli.map import as_json, read_items
from shoal.core.errors import ConfigError

FILE = """
def double(item):
    return item * 2

def odd(item):
    if item % 2 == 0:
        raise ValueError(f"{item} is even")
    return item
"""


ODD = """
import math
from fractions import Fraction

class Mute:
    def __repr__(self):
        raise RuntimeError("no")

def strange(number):
    itself = []
    itself.append(itself)
    found = [{(1, 2): "x", 3: math.nan, None: 1}, [1.5, math.nan, -math.inf], {4}, {math.nan: Fraction(1, 3)}]
    return [*found, Mute(), itself, (1, (2, 3))][number]
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f.py").write_text(FILE)
    return tmp_path / "f.py"


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_items_are_lines_json_a_pattern_or_a_range(file: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\n")
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n[2]\n')
    (tmp_path / "a.json").write_text('[1, "b"]')
    assert read_items("a.txt") == ["one", "two"]
    assert read_items("a.jsonl") == [{"x": 1}, [2]]
    assert read_items("a.json") == [1, "b"]
    assert read_items(str(tmp_path / "a.*")) == [str(tmp_path / f"a.{kind}") for kind in ("json", "jsonl", "txt")]
    assert read_items("range:2:8:3") == [2, 5]
    (tmp_path / "b.json").write_text('{"x": 1}')
    (tmp_path / "c.jsonl").write_text("{")
    for text in ("nothing*", "range:a", "range:", "b.json", "c.jsonl"):
        with pytest.raises(ConfigError):
            read_items(text)


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_an_item_ends_with_its_line_and_nowhere_else(mark: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(f"one{mark}more\r\ntwo\n".encode())
    assert read_items(str(tmp_path / "a.txt")) == [f"one{mark}more", "two"]
    text = f"one{mark}more" if ord(mark) > 0x1F else "one"  # JSON has those below only escaped
    written = json.dumps(text, ensure_ascii=False)
    (tmp_path / "a.jsonl").write_text(f"{written}\n2\n", encoding="utf-8")
    (tmp_path / "a.json").write_text(f"[{written},\n2]", encoding="utf-8")
    assert read_items(str(tmp_path / "a.jsonl")) == [text, 2]
    assert read_items(str(tmp_path / "a.json")) == [text, 2]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_items_that_are_not_utf_8_are_refused_with_the_byte(
    name: str, file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_bytes(b'"caf\xe9"\n')
    assert main(["map", "f.py:double", name]) == 2
    assert f"{name} is not UTF-8: byte 4 is 0xe9." in capfd.readouterr().err


def test_results_are_lines_in_order(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["map", "f.py:double", "range:0:5"]) == 0
    assert "5 of 5 tasks are done: double-map/results.jsonl" in capfd.readouterr().out
    expected = [{"item": number, "result": 2 * number} for number in range(5)]
    assert lines(tmp_path / "double-map" / "results.jsonl") == expected
    assert main(["map", "f.py:double", "range:0:5", "--out", "o", "--workers", "2", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"results": "o/results.jsonl", "tasks": 5, "failed": 0, "errors": {}}


def test_failed_tasks_are_exit_code_1_and_shown(file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["map", "f.py:odd", "range:0:3"]) == 1
    printed = capfd.readouterr().out
    assert "1 of 3 tasks are done" in printed
    assert "The first, task 0:" in printed
    assert "ValueError: 0 is even" in printed
    found = lines(tmp_path / "odd-map" / "results.jsonl")
    assert found == [
        {"item": 0, "error": "ValueError: 0 is even"},
        {"item": 1, "result": 1},
        {"item": 2, "error": "ValueError: 2 is even"},
    ]


def test_results_that_json_does_not_know_are_written_as_python_shows_them(
    file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "odd.py").write_text(ODD)
    assert main(["map", "odd.py:strange", "range:0:7"]) == 0
    found = [line["result"] for line in lines(tmp_path / "strange-map" / "results.jsonl")]
    assert found == [
        {"(1, 2)": "x", "3": None, "null": 1},
        [1.5, None, None],
        "{4}",
        {"nan": "Fraction(1, 3)"},
        "a Mute",
        "[[...]]",
        [1, [2, 3]],
    ]


def test_what_is_written_is_json() -> None:
    for value in (math.nan, {math.inf: 1}, {(): math.nan}):
        json.loads(as_json({"result": value}), parse_constant=pytest.fail)


@pytest.mark.parametrize("flag", ["--time 5m", "--cores 2", "--gpus 0", "--task-time 1s", "--partition p", "--site s"])
def test_flags_about_a_cluster_are_refused_without_one(
    file: Path, flag: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["map", "f.py:double", "range:0:3", *flag.split()]) == 2
    assert f"{flag.split(maxsplit=1)[0]} is about jobs on a cluster. Give --slurm, too" in capfd.readouterr().err
    assert not Path("double-map").exists()


def test_mistakes_are_exit_code_2(file: Path, capfd: pytest.CaptureFixture[str]) -> None:
    asked = ["map", "f.py:double", "range:0:100000", "--slurm", "--tasks-per-job", "1"]
    assert main(asked) == 2
    assert "100,000 jobs" in capfd.readouterr().err
    assert main([*asked[:-1], "0"]) == 2
    assert "tasks_per_job=0: give at least 1, or leave it out" in capfd.readouterr().err
    assert not Path("double-map").exists()
    for wrong in (["f.py:triple", "range:0:3"], ["f.py", "range:0:3"], ["f.py:double", "no"]):
        assert main(["map", *wrong]) == 2
    assert main(["map", "f.py:double", "range:0:3", "--workers", "0"]) == 2
    assert main(["map", "f.py:double", "range:0:3", "--retries", "-1"]) == 2
    assert main(["map", "f.py:double", "range:0:3", "--reads-at-once", "some"]) == 2

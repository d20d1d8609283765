"""Names that say nothing, and numbers without a unit, do not come in."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import shoal

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("shoal", "tests", "examples") for path in (ROOT / folder).rglob("*.py")]

EMPTY_WORDS = re.compile(r"(^|_)(utils?|helpers?|common|misc|manager)(_|$)", re.IGNORECASE)
EMPTY_CLASSES = re.compile(r"(Manager|Helper|Util|Utils)$")
# The unit is in the name: timeout_s, bucket_bytes, link_GBps.
UNITLESS = {"timeout", "duration", "delay", "interval", "latency", "bandwidth", "bw", "ws", "bucket_size"}


def names(tree: ast.AST) -> Iterator[str]:
    """Yield the names of all functions, arguments and classes that `tree` defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg


def faults(file_stem: str, source: str) -> list[str]:
    """Return the names in a module that say nothing or lack their unit."""
    found = [file_stem] if EMPTY_WORDS.search(file_stem) else []
    for name in names(ast.parse(source)):
        if EMPTY_WORDS.search(name) or EMPTY_CLASSES.search(name) or name in UNITLESS:
            found.append(name)
    return found


def test_every_name_says_something() -> None:
    found = {str(path): bad for path in FILES if (bad := faults(path.stem, path.read_text()))}
    assert found == {}


def test_planted_names_are_seen() -> None:
    assert faults("utils", "") == ["utils"]
    assert faults("link", "def f(timeout): ...") == ["timeout"]
    assert faults("link", "class RunManager: ...") == ["RunManager"]


def test_all_is_what_can_be_imported_and_what_is_documented() -> None:
    assert sorted(shoal.__all__) == sorted(shoal._HOMES)
    for name in shoal.__all__:
        assert getattr(shoal, name).__name__ == name
    documented = re.findall(r"^### `shoal\.(\w+)", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(shoal.__all__)


def test_no_file_is_longer_than_300_lines() -> None:
    assert {str(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 300} == {}

"""Functions by reference: of modules, of the script that was started, of files; and those that have no name."""

import builtins
import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.core.errors import ConfigError, JobError
from shoal.tasks.call import Reference, load, load_file, parse_function, refer
from tests.tasks import work

ROOT = Path(__file__).parents[2]

SCRIPT = """
import shoal

class Thing:
    def __init__(self, number):
        self.number = number

def twice(thing):
    return Thing(2 * thing.number)

{guard}
    print(*[thing.number for thing in shoal.map(twice, [Thing(1), Thing(2)], workers=1)])
"""


def run(tmp_path: Path, guard: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "a script's é.py"
    script.write_text(SCRIPT.format(guard=guard))
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_function_of_a_module_goes_by_name() -> None:
    assert refer(work.double) == Reference(module="tests.tasks.work", name="double")
    assert load(refer(work.double)) is work.double
    assert load(refer(len)) is len


def test_functions_and_classes_of_the_script_go_both_ways(tmp_path: Path) -> None:
    done = run(tmp_path, 'if __name__ == "__main__":')
    assert done.stdout == "2 4\n", done.stderr


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    done = run(tmp_path, "if True:")
    assert done.returncode != 0
    assert 'Put what is to run once under: if __name__ == "__main__":' in done.stderr


def test_a_function_of_a_file_goes_by_path(tmp_path: Path) -> None:
    file = tmp_path / "f.py"
    file.write_text("def one(item):\n    return 1\n")
    assert parse_function(f"{file}:one") == (file, "one")
    function = load_file(str(file)).one
    assert refer(function) == Reference(file=str(file), name="one")
    with pytest.raises(JobError, match=r"f.py has no function 'two'"):
        load(Reference(file=str(file), name="two"))
    for text in ("f.py", "f.py:", ":one", f"{file}:1+1"):
        with pytest.raises(ConfigError, match="names no function"):
            parse_function(text)
    with pytest.raises(ConfigError, match="there is no file"):
        parse_function("nowhere.py:f")


def test_without_cloudpickle_a_lambda_is_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match="Write it with `def` at the top level of a file, or install cloudpickle"):
        refer(lambda item: item)


def test_partial_functions_go_where_cloudpickle_is() -> None:
    pytest.importorskip("cloudpickle")
    partial: Any = functools.partial(builtins.pow, 2)
    assert load(refer(partial))(5) == 32

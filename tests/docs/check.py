"""What of a command or a block can be said without running it: a mistake in it, if there is one."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import re
import tomllib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import shoal
from shoal.cli.main import build_parser
from tests.docs.blocks import ROOT, Block
from tests.docs.commands import commands_of


def mistake_in_block(block: Block) -> str:
    """Return what is wrong with a block that is not run: with its commands, or with what its Python wants of shoal."""
    if block.language == "":
        mistakes = {command.where: mistake_in(command.words) for command in commands_of(block)}
        return "\n".join(f"{where}: {mistake}" for where, mistake in mistakes.items() if mistake)
    return "\n".join(_mistakes_in_python(block.text)) if block.language == "python" else ""


def mistake_in(words: tuple[str, ...]) -> str:
    """Return what is wrong with a command: a flag, a file, a target or an extra that does not exist. Empty: nothing."""
    program, rest = words[0], list(words[1:])
    missing = [word for word in rest if re.fullmatch(r"examples/[\w/]+\.\w+", word) and not (ROOT / word).exists()]
    if missing:
        return f"there is no {missing[0]}"
    if program == "shoal":
        return _parse(rest)
    if program in ("torchrun", "ssh") and "shoal" in rest:  # torchrun -m shoal ..., ssh HOST shoal ...
        return _parse(rest[rest.index("shoal") + 1 :])
    if program in ("python", "pytest"):
        return _script(rest)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return "" if rest[0] in targets else f"the Makefile has no {rest[0]}"
    if program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        asked = {extra for word in rest for found in re.findall(r"\[(.*?)\]", word) for extra in found.split(",")}
        return f"there are no extras {sorted(asked - set(extras))}" if asked - set(extras) else ""
    return ""


def _parse(arguments: list[str]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        try:
            build_parser().parse_args(arguments)
        except SystemExit as left:
            return said.getvalue() if left.code else ""
    return ""


def _script(words: list[str]) -> str:
    path = ROOT / words[0]
    if PurePosixPath(words[0]).parts[0] not in ("benchmarks", "docs", "tests"):
        return ""  # one of the page's own
    if not path.exists():
        return f"there is no {words[0]}"
    text = path.read_text() if path.is_file() else ""
    unknown = [word for word in words[1:] if word.startswith("--") and f'"{word}"' not in text]
    return f"{words[0]} does not know {unknown}" if unknown else ""


def _mistakes_in_python(code: str) -> Iterator[str]:
    """Yield what is no Python, and what is not in shoal: a name, an import, an argument."""
    try:
        nodes = list(ast.walk(ast.parse(code)))
    except SyntaxError as error:
        yield f"it is no Python: {error}"
        return
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shoal":
            module = importlib.import_module(node.module or "")
            yield from (f"{node.module} has no {name.name}" for name in node.names if not hasattr(module, name.name))
        elif (name := _of_shoal(node)) and not hasattr(shoal, name):
            yield f"shoal has no {name}"
        elif isinstance(node, ast.Call) and (name := _of_shoal(node.func)) and hasattr(shoal, name):
            known = _arguments(getattr(shoal, name))
            yield from (f"shoal.{name} takes no {each.arg}" for each in node.keywords if each.arg not in known)


def _of_shoal(node: ast.AST) -> str:
    """Return the name that stands behind `shoal.`; empty: this is something else."""
    is_it = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "shoal"
    return node.attr if is_it and isinstance(node, ast.Attribute) else ""


def _arguments(public: Any) -> set[str | None]:
    """Return what `public` can be given by name; **fields, whose names nobody knows, are None."""
    if dataclasses.is_dataclass(public):
        return {field.name for field in dataclasses.fields(public)} | {None}
    return set(inspect.signature(public).parameters) | {None}

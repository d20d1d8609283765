"""Plays a page from top to bottom: every block is run, or there is a reason."""

import ast
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.core.errors import ShoalError
from shoal.core.toml import parse_toml
from shoal.spec.cluster import Cluster
from shoal.spec.communication import Communication
from shoal.spec.device import Device, Link
from shoal.spec.plan import Plan
from tests.docs.blocks import Block
from tests.docs.check import mistake_in, mistake_in_block
from tests.docs.commands import Command, commands_of
from tests.docs.given import Given, named_by
from tests.docs.outputs import first_difference
from tests.docs.reasons import why_not
from tests.docs.warm import Interpreter, Playing

COMMAND_S = 120.0
TOML = {
    "plan.toml": Plan,
    "cluster.toml": Cluster,
    "communication.toml": Communication,
    "catalog/devices": Device,
    "catalog/links": Link,
}
SHOWN_ONLY = ("text", "json", "html", "yaml", "diff")
"""Languages of blocks that nothing can run."""


@dataclass(frozen=True)
class Played:
    """What became of a block or a command: it was run, or not, for a reason; and what is wrong with it."""

    where: str
    not_run: str = ""
    wrong: str = ""
    seconds: float = 0.0


class Player:
    """Plays the blocks of one page in `folder`. `already` has the commands that others have run, of the same files."""

    def __init__(self, folder: Path, given: Given, *, already: set[str], full_size: bool) -> None:
        self._folder, self._given, self._full_size = folder, given, full_size
        self._already = already
        self._own_files = False
        self._above: set[str] = set()
        self._interpreter: Interpreter | None = None
        self._background: list[tuple[Command, Playing]] = []
        self._count = 0

    def play(self, blocks: list[Block]) -> Iterator[Played]:
        """Play the page, and yield what became of each block and command."""
        try:
            for block in blocks:
                yield from _timed(self._block(block))
            for command, playing in self._background:
                yield from _timed(self._ended(command, playing))
        finally:
            for _, playing in self._background:
                playing.kill()
            if self._interpreter:
                self._interpreter.close()

    def _block(self, block: Block) -> Iterator[Played]:
        if "not-run" in block.attributes:
            yield Played(block.where, not_run=block.attributes["not-run"], wrong=mistake_in_block(block))
        elif block.language in SHOWN_ONLY:
            yield Played(block.where, not_run="it is no code")
        elif block.language == "toml":
            yield Played(block.where, wrong=_toml_mistake(block))
        elif block.language == "python":
            yield self._python(block)
        elif block.language == "" and block.text.startswith(">>> "):
            yield self._doctest(block)
        elif block.language == "":
            yield from self._commands(block)
        else:
            yield Played(block.where, wrong=f"nobody knows how to run {block.language!r}")

    def _commands(self, block: Block) -> Iterator[Played]:
        wrong = self._before(block)
        if wrong:
            yield Played(block.where, wrong=wrong)
        for command in commands_of(block):
            yield from self._command(command)

    def _before(self, block: Block) -> str:
        """Run what readers have and the block does not say; return what is wrong with it."""
        if block.before:
            self._own_files = True
        return self._run(block.before, f"{block.where} (before)")[1] if block.before else ""

    def _python(self, block: Block) -> Played:
        wrong = self._before(block)
        if wrong:
            return Played(block.where, wrong=wrong)
        if block.text.startswith(">>> "):
            return self._doctest(block)
        name = block.attributes.get("file")
        if name:
            self._own_files = True
            (self._folder / name).write_text(block.text)
        self._give_literals(block.text)
        module = "a_module" if name else "__main__"  # a file is run by a command, if it is one that does something
        return Played(block.where, wrong=self._run(block.text, block.where, module=module)[1])

    def _doctest(self, block: Block) -> Played:
        wrong = self._before(block)
        for example in _examples(block.text):
            printed, failed = self._run(example[0], block.where)
            printed += failed.splitlines()[-1].rpartition("errors.")[2] if failed else ""
            if not wrong and (first_difference(example[1], printed) or (failed and not example[1])):
                wrong = f"{example[0]} prints:\n{printed}{failed}"
        return Played(block.where, wrong=wrong)

    def _run(self, code: str, name: str, *, module: str = "__main__") -> tuple[str, str]:
        if self._interpreter is None:
            self._interpreter = Interpreter(self._folder)
        self._give_literals(code)
        return self._interpreter.run(code, name, module=module)

    def _give_literals(self, code: str) -> None:
        for name in _literals(code):
            self._given.give(name, self._folder)

    def _command(self, command: Command) -> Iterator[Played]:
        mistake = mistake_in(command.words)
        reason = why_not(str(command), full_size=self._full_size)
        if mistake or reason:
            yield Played(command.where, not_run=reason or "", wrong=mistake)
            return
        if not command.shown and str(command) in (self._above if self._own_files else self._already):
            yield Played(command.where, not_run="it was run already, of the same files")
            return
        for name in ("cluster.toml", *named_by(command.words)):
            self._given.give(name, self._folder)
        self._count += 1
        playing = Playing(command.words, self._folder, self._folder.with_name(f"printed-{self._count}.txt"))
        if command.in_background:
            self._background.append((command, playing))
            yield Played(command.where)
            return
        if "--web" in command.words:
            _await_text(playing, "http://127.0.0.1")
            playing.interrupt()
        yield from self._ended(command, playing)
        (self._above if self._own_files else self._already).add(str(command))

    def _ended(self, command: Command, playing: Playing) -> Iterator[Played]:
        try:
            code = playing.wait(COMMAND_S)
        except TimeoutError as error:
            yield Played(command.where, wrong=str(error))
            return
        is_error = bool(command.shown) and command.shown[0].split(":")[0].endswith("Error")
        expected = {int(command.block.attributes.get("exit", 2 if is_error else 0))}
        if "--web" in command.words:
            expected |= {130}
        if code not in expected:
            yield Played(command.where, wrong=f"it ended with {code}:\n{playing.text()[-3000:]}")
            return
        differs = "" if "output" in command.block.attributes else first_difference(command.shown, playing.text())
        yield Played(command.where, wrong=differs and f"the page shows\n{differs}\nand it prints\n{playing.text()}")


def _timed(played: Iterator[Played]) -> Iterator[Played]:
    """Yield what was played, with the seconds that it took."""
    began_s = time.monotonic()
    for one in played:
        yield replace(one, seconds=time.monotonic() - began_s)
        began_s = time.monotonic()


def _literals(code: str) -> set[str]:
    """Return the strings in `code`, less what `shoal.pack` writes."""
    nodes = list(ast.walk(ast.parse(code)))
    packs = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "shoal.pack"]
    written = {ast.literal_eval(call.args[1]) for call in packs if isinstance(call.args[1], ast.Constant)}
    strings = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return strings - written


def _await_text(playing: Playing, text: str) -> None:
    end_s = time.monotonic() + COMMAND_S
    while text not in playing.text() and playing.is_running() and time.monotonic() < end_s:
        time.sleep(0.02)


def _toml_mistake(block: Block) -> str:
    first = block.text.splitlines()[0]
    kind = next((kind for name, kind in TOML.items() if name in first), None)
    if kind is None:
        return f"its first line must be a comment that names one of {sorted(TOML)}"
    try:
        parse_toml(kind, block.text, name=block.where)
    except ShoalError as error:
        return str(error)
    return ""


def _examples(text: str) -> list[tuple[str, tuple[str, ...]]]:
    """Return the inputs of an interactive session, each with what it shows. An expression is printed as Python does."""
    found: list[tuple[list[str], list[str]]] = []
    for line in text.splitlines():
        if line.startswith(">>> "):
            found.append(([line[4:]], []))
        elif line.startswith("... ") and not found[-1][1]:
            found[-1][0].append(line[4:])
        else:
            found[-1][1].append(line)
    return [(_printing("\n".join(code)), tuple(shown)) for code, shown in found]


def _printing(code: str) -> str:
    tree = ast.parse(code)
    if isinstance(tree.body[-1], ast.Expr) and not ast.unparse(tree.body[-1]).startswith("print("):
        return f"_ = {ast.unparse(tree.body[-1].value)}\nif _ is not None: print(repr(_))"
    return code

"""The commands of a block.

A table has one a line; what it does stands behind it, after two spaces or more:

    shoal train train.py --workers 4       four, on this machine

A session has what they print, too; a command begins with a dollar, and goes on after a backslash:

    $ shoal cost broadcast --bytes 5MB --workers 8 --link 1MB/s
    broadcast of 5 MB among 8 workers ...
"""

import re
import shlex
from dataclasses import dataclass

from shoal.cli.main import VERBS
from tests.docs.blocks import Block

PROGRAMS = ("shoal", "torchrun", "python", "pytest", "make", "pip", "ssh")


@dataclass(frozen=True)
class Command:
    """One command, and what the page says that it prints (empty: the page does not say)."""

    block: Block
    line: int
    words: tuple[str, ...]
    shown: tuple[str, ...] = ()
    in_background: bool = False

    @property
    def where(self) -> str:
        """Return where it stands, for a message."""
        return f"{self.block.page}:{self.line}: {self}"

    def __str__(self) -> str:
        return shlex.join(self.words)


def commands_of(block: Block) -> list[Command]:
    """Return the commands of a block without a language; ValueError if something in it is none."""
    lines = block.text.splitlines()
    return _session(block, lines) if any(line.startswith("$ ") for line in lines) else _table(block, lines)


def _session(block: Block, lines: list[str]) -> list[Command]:
    found: list[tuple[int, str, list[str]]] = []
    for number, line in enumerate(lines, block.line):
        if line.startswith("$ "):
            found.append((number, line[2:], []))
        elif not found:
            raise ValueError(f"{block.page}:{number}: {line!r} stands before the first command.")
        elif found[-1][1].endswith("\\"):
            found[-1] = (found[-1][0], found[-1][1][:-1] + line.strip(), found[-1][2])
        else:
            found[-1][2].append(line)
    return [_command(block, number, text, tuple(shown)) for number, text, shown in found]


def _table(block: Block, lines: list[str]) -> list[Command]:
    commands = []
    for number, line in enumerate(lines, block.line):
        if not line.strip() or line.startswith((" ", "#")):  # more of what the line before does
            continue
        cells = re.split(r"\s{2,}", line.strip())
        if not cells[0].startswith(PROGRAMS):
            raise ValueError(
                f"{block.page}:{number}: {cells[0]!r} is no command. What is printed, or looks so, is a ```text block."
            )
        if any(cell.startswith("-") for cell in cells):
            raise ValueError(f"{block.page}:{number}: two spaces end a command, and here a flag follows them.")
        commands += [_command(block, number, cell) for place, cell in enumerate(cells) if place == 0 or _is_verb(cell)]
    return commands


def _is_verb(cell: str) -> bool:
    """Return whether a cell behind the first is one more command: `shoal attach R  see it again  shoal cancel R`."""
    words = cell.split()
    return len(words) > 1 and words[0] == "shoal" and words[1] in VERBS


def _command(block: Block, number: int, text: str, shown: tuple[str, ...] = ()) -> Command:
    in_background = text.endswith(" &")
    text = re.sub(r"\[(--[^]]*)\]", r"\1", text.removesuffix(" &"))  # [--rounds 15]: who likes
    return Command(block, number, tuple(shlex.split(text)), shown, in_background)

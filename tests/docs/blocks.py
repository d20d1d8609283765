"""The code blocks of a page.

    ```python file="train.py"      Python; written to train.py too
    ```python not-run="why"        not run, and counted
    ```toml                        read as what its first comment names: plan.toml, cluster.toml, a device
    ```                            commands: `shoal VERB ...   what it does`, or `$ shoal VERB ...` and what it prints
    ```text                        neither: what something prints, or looks like

A comment `<!-- before ... -->` above a block is Python that is run before it: what readers have and it does not repeat.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]

ATTRIBUTES = {"file", "not-run", "exit", "output"}
"""What may stand behind the language: `exit` is the exit code of its commands; `output="example"`: of other days."""

_OPEN = re.compile(r"^(?P<indent> *)(?P<fence>`{3,})(?P<language>[\w+-]*) *(?P<rest>.*)$")
_ATTRIBUTE = re.compile(r'([\w-]+)="([^"]*)"')
_BEFORE = re.compile(r"<!-- before\n(.*?)-->\s*\Z", re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One code block."""

    page: str
    line: int
    """Of its first line of code, counted from 1."""
    language: str
    text: str
    before: str = ""
    attributes: dict[str, str] = field(default_factory=dict)

    @property
    def where(self) -> str:
        """Return where it stands, for a message."""
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return every page: the README, and what is in docs/."""
    return ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))]


def blocks_of(page: str, text: str | None = None) -> list[Block]:
    """Return the code blocks of a page; `text` is what it says, instead of the file."""
    return list(_blocks(page, (ROOT / page).read_text() if text is None else text))


def _blocks(page: str, text: str) -> Iterator[Block]:
    lines = text.splitlines()
    number = after = 0
    while number < len(lines):
        opened = _OPEN.match(lines[number])
        number += 1
        if opened is None:
            continue
        above = "\n".join(lines[after : number - 1])
        first = number
        while number < len(lines) and lines[number].strip() != opened["fence"]:
            number += 1
        if number == len(lines):
            raise ValueError(f"{page}:{first}: the block that begins here does not end.")
        inside = [line.removeprefix(opened["indent"]) for line in lines[first:number]]
        attributes = dict(_ATTRIBUTE.findall(opened["rest"]))
        unknown = set(attributes) - ATTRIBUTES or _ATTRIBUTE.sub("", opened["rest"]).strip()
        if unknown:
            raise ValueError(f"{page}:{first}: {unknown} is no attribute of a block. There are {sorted(ATTRIBUTES)}.")
        before = _BEFORE.search(above)
        number += 1
        after = number
        code = "\n".join(inside) + "\n"
        yield Block(page, first + 1, opened["language"], code, before[1] if before else "", attributes)

"""Asking shoal, and what must be so afterwards: for bad_input.py."""

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.cli.main import main as shoal_command
from shoal.core.errors import ShoalError
from shoal.data.loader import Loader
from shoal.data.pack.checksum import file_checksum
from shoal.data.pack.reader import Pack

PLAIN = ("--storage-speed", "1GB/s")
"""Not measured anew for each case."""


@dataclass
class Row:
    """One answer of shoal's."""

    bad: str
    asked: str
    said: str
    left: str = "nothing"
    wrong: str = ""
    """What is not as it must be."""


@dataclass(frozen=True)
class Case:
    """A source that is bad and can be mended, packed into `folder`."""

    folder: Path
    bad: str
    source: str
    named: str
    """What the answer must say, as a pattern."""
    mend: Callable[[], object]
    skipped: int | None = None
    """How many samples `--on-error skip` must count; None: it must refuse, too."""
    flags: tuple[str, ...] = ()

    def rows(self) -> Iterator[Row]:
        """Yield what shoal says: as it is, told to skip, and when it is mended."""
        command = ("pack", self.source, "out.pack", "--part-size", "100kB", *PLAIN, *self.flags)
        yield self._refused(command)
        if self.skipped is not None:
            yield self._skipped((*command, "--on-error", "skip"))
        self.mend()
        yield self._good(command)

    def _refused(self, command: tuple[str, ...]) -> Row:
        code, said = shoal(self.folder, *command)
        row = Row(self.bad, f"shoal pack {self.source} out.pack", said, left(self.folder))
        row.wrong = must(code == 2, f"exit code {code}") or must(re.search(self.named, said), "not named")
        row.wrong = row.wrong or half_written(self.folder)
        return row

    def _skipped(self, command: tuple[str, ...]) -> Row:
        code, said = shoal(self.folder, *command)
        row = Row(self.bad, f"shoal pack {self.source} out.pack --on-error skip", said, "out.pack, whole")
        counted = Pack(self.folder / "out.pack").manifest.skipped if code == 0 else None
        row.wrong = must(counted == self.skipped, f"counted {counted}") or must(
            re.search(self.named, said), "not named"
        )
        row.wrong = row.wrong or whole(self.folder)
        return row

    def _good(self, command: tuple[str, ...]) -> Row:
        code, said = shoal(self.folder, *command)
        wrong = must(code == 0, f"exit code {code}") or whole(self.folder)
        return Row("the same, mended", f"shoal pack {self.source} out.pack", said, "out.pack, whole", wrong)


def must(is_so: object, otherwise: str) -> str:
    """Return what is wrong, or nothing."""
    return "" if is_so else f"NO: {otherwise}"


def shoal(folder: Path, *command: str) -> tuple[int, str]:
    """Run a command of shoal's in `folder`; return its exit code and what it says, without the folder's name."""
    out, before = io.StringIO(), Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = shoal_command(list(command))
    finally:
        os.chdir(before)
    return code, said_by(out.getvalue(), folder)


def said_by(text: str, folder: Path) -> str:
    """Return the last sentence of what was printed; of a pack that was written also what was skipped."""
    lines = [line.strip() for line in text.replace(f"{folder}/", "").strip().splitlines()]
    begin = next((at for at, line in enumerate(lines) if line.startswith(("Packed", "Skipped"))), len(lines) - 1)
    said = " ".join(lines[begin:])
    return re.sub(r", in [\d.]+ .*?rows/s\)", "", said)


def left(folder: Path) -> str:
    """Return what of a pack is there."""
    found = sorted(path.name for path in folder.iterdir() if path.name.startswith("out.pack"))
    parts = len({path.name.partition(".")[0] for path in folder.glob("out.pack.unfinished/parts/*")})
    return f"{', '.join(found)}: {parts} whole part{'s' * (parts != 1)}" if found else "nothing"


def half_written(folder: Path) -> str:
    """Return what is there that is neither whole nor known to the journal."""
    unfinished = folder / "out.pack.unfinished"
    if (folder / "out.pack").exists():
        return "NO: there is a pack"
    journals = [json.loads(file.read_text()) for file in unfinished.glob("journal/*.json")]
    files = {file["name"]: file for journal in journals for part in journal["parts"] for file in part["files"]}
    here = {f"parts/{path.name}" for path in unfinished.glob("parts/*")}
    wrong = [name for name in here if file_checksum(unfinished / name) != files.get(name, {}).get("checksum")]
    return must(here == set(files) and not wrong, f"half-written: {sorted(here ^ set(files)) or wrong}")


def whole(folder: Path) -> str:
    """Check and load the pack that was written, and remove it."""
    code, said = shoal(folder, "pack", "--check", "out.pack")
    rows = sum(1 for _ in Loader(folder / "out.pack", batch_size=1, shuffle=False)) if code == 0 else 0
    wrong = must(code == 0 and rows == Pack(folder / "out.pack").num_rows, said) or must(
        not (folder / "out.pack.unfinished").exists(), "out.pack.unfinished is left"
    )
    shutil.rmtree(folder / "out.pack", ignore_errors=True)
    return wrong


def asked(bad: str, asked: str, named: str, ask: Callable[[], object], folder: Path) -> Row:
    """Return what is said to a call from Python, which must raise."""
    try:
        ask()
    except ShoalError as error:
        said = f"{type(error).__name__}: {error}".replace(f"{folder}/", "")
        return Row(bad, asked, said, left(folder), must(re.search(named, said), "not named"))
    except Exception as error:  # what shoal does not raise on purpose
        return Row(bad, asked, repr(error), left(folder), "NO: not an error of shoal's")
    return Row(bad, asked, "nothing", left(folder), "NO: it was not noticed")

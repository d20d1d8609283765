"""What of a pack is finished while it is being written, in a folder that becomes the pack at the end:

    NAME.pack.unfinished/
      lock                   held by the process that writes, and by those it has started
      recipe.json            what was asked for, and what was decided: columns, compression
      journal/00003.json     the finished parts of group 3 of the source's slices, and how far these have been read
      parts/00003-00000.arrow ...

A part that the journal names is whole and on the disk. All else is removed when the work goes on after a crash.
"""

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.files import write_whole
from shoal.data.pack.manifest import Part, PartFile

_LOCK_S = 10.0


@dataclass(frozen=True)
class Progress:
    """How far a group of slices has been packed."""

    fingerprints: tuple[str, ...] = ()
    """Of the group's slices, when reading began."""
    parts: tuple[Part, ...] = ()
    slice: int = 0
    """The slice of the group to go on with."""
    samples: int = 0
    """How many of its samples have been read."""
    skipped: int = 0
    examples: tuple[str, ...] = ()
    """Why the first of those were skipped."""
    is_done: bool = False

    @property
    def num_rows(self) -> int:
        """The rows in its parts."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """The bytes of its parts."""
        return sum(file.num_bytes for part in self.parts for file in part.files)


class Journal:
    """The unfinished folder of a pack."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def create(self, recipe: dict[str, Any]) -> None:
        """Begin anew: nothing is finished."""
        for name in ("journal", "parts"):
            shutil.rmtree(self.path / name, ignore_errors=True)
            (self.path / name).mkdir()
        write_whole(self.path / "recipe.json", json.dumps(recipe, indent=1, sort_keys=True))

    def recipe(self) -> dict[str, Any] | None:
        """Return what an earlier attempt was asked for and decided; None where there was none."""
        try:
            content = json.loads((self.path / "recipe.json").read_text())
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def read(self, group: int) -> Progress:
        """Return how far a group is; not at all where a file of it is missing."""
        try:
            content = json.loads(self._file(group).read_text())
            parts = tuple(_part(part) for part in content.pop("parts"))
            fingerprints, examples = tuple(content.pop("fingerprints")), tuple(content.pop("examples"))
            progress = Progress(fingerprints=fingerprints, parts=parts, examples=examples, **content)
        except (OSError, ValueError, KeyError, TypeError):
            return Progress()
        return progress if all(self._is_here(part) for part in parts) else Progress()

    def write(self, group: int, progress: Progress) -> None:
        """Write down how far a group is."""
        write_whole(self._file(group), json.dumps(dataclasses.asdict(progress)))

    def forget(self, group: int) -> None:
        """Take a group as not begun."""
        self._file(group).unlink(missing_ok=True)

    def forget_skipped(self, groups: Iterable[int]) -> None:
        """Take those groups as not begun of which samples were left out."""
        for group in groups:
            if self.read(group).skipped:
                self.forget(group)

    def clean(self, parts: set[str]) -> None:
        """Remove every file of a part that is not among `parts`."""
        for file in (self.path / "parts").iterdir():
            if file.name.split(".", maxsplit=1)[0] not in parts:
                file.unlink()

    def remove_all_but_the_pack(self) -> None:
        """Leave what makes a pack."""
        shutil.rmtree(self.path / "journal")
        for name in ("recipe.json", "lock"):
            (self.path / name).unlink(missing_ok=True)

    def _file(self, group: int) -> Path:
        return self.path / "journal" / f"{group:05d}.json"

    def _is_here(self, part: Part) -> bool:
        try:
            return all((self.path / file.name).stat().st_size == file.num_bytes for file in part.files)
        except OSError:
            return False


def _part(content: dict[str, Any]) -> Part:
    files = tuple(PartFile(**file) for file in content["files"])
    return Part(content["name"], content["num_rows"], files, content["num_values"], content["packed_rows"])


@contextlib.contextmanager
def locked(path: Path, *, timeout_s: float = _LOCK_S) -> Iterator[int]:
    """Hold the lock of the unfinished folder `path`, and yield its descriptor, for those who work for us.

    A killed writer's processes hold it a moment longer than itself: that is waited for.
    """
    handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        end_s = time.monotonic() + timeout_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end_s:
                    raise ConfigError(
                        f"another shoal pack is writing {path}. Wait for it, or give another destination."
                    ) from None
                time.sleep(0.05)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
                    raise
                break  # some parallel file systems have no locks: whoever packs twice at once there is not told
        yield handle
    finally:
        os.close(handle)

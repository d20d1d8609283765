"""The folder of a map: all that the side that submits and the side that runs know of each other.

    map.json      the function, and how many items there are
    call.pkl      how workers find the function
    items.pkl     the items, each pickled by itself, and where each begins
    done/         journals: what was done, with the results (journal.py)
    open/, taken/ bunches for jobs (claims.py)
    jobs/         what was submitted: scripts, output, job ids
    code/         the code of the jobs, as it was when they were submitted (code.py)

The folder, and each in it, is its owner's alone (mode 0700): what lies there is unpickled, and run.
"""

import contextlib
import json
import os
import pickle
import shlex
import struct
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.files import write_whole
from shoal.tasks.call import Reference

_COUNT = struct.Struct("<Q")
_PARTS = ("done", "open", "taken", "jobs", "code")


class TaskFolder:
    """An open folder of a map."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done, self.open, self.taken, self.jobs, self.code = (path / part for part in _PARTS)

    @classmethod
    def begin(cls, path: Path, reference: Reference, items: Sequence[Any]) -> "TaskFolder":
        """Make the folder, or go on with what it holds; ConfigError where that is another map."""
        folder = cls(path.resolve())
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder._check_owner()
        if (path / "map.json").is_file():
            folder._check_same(reference, items)
        elif any(path.iterdir()):
            raise ConfigError(f"{path} holds something else than the tasks of a map. Give an empty or a new folder.")
        for part in _PARTS:
            (folder.path / part).mkdir(mode=0o700, exist_ok=True)
        data = [pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in items]
        write_whole(folder.path / "call.pkl", pickle.dumps((reference, sys.path)))
        if not (path / "map.json").is_file():
            write_whole(folder.path / "items.pkl", _packed(data))
            said = {"function": str(reference), "items": len(items), "checksum": _checksum(data)}
            write_whole(folder.path / "map.json", json.dumps(said, indent=1))
        return folder

    @classmethod
    def existing(cls, path: Path) -> "TaskFolder":
        """Return the folder that another process has made."""
        folder = cls(path.resolve())
        if not (path / "map.json").is_file():
            raise ConfigError(f"{path} is no folder of a map: it has no map.json.")
        folder._check_owner()
        return folder

    def call(self) -> tuple[Reference, list[str]]:
        """Return how to find the function, and the path of Python of whoever asked."""
        found: tuple[Reference, list[str]] = pickle.loads((self.path / "call.pkl").read_bytes())  # noqa: S301  # ours
        return found

    def count(self) -> int:
        """Return how many items there are."""
        return int(json.loads((self.path / "map.json").read_bytes())["items"])

    def items(self) -> "Items":
        """Return the items, to be closed."""
        return Items(self.path / "items.pkl")

    def _check_owner(self) -> None:
        for path in (self.path, *(self.path / part for part in _PARTS)):
            if path.exists() and (path.stat().st_uid != os.getuid() or path.stat().st_mode & 0o022):
                raise ConfigError(
                    f"{path} can be written by others, and what lies there is unpickled. Give a folder of your own, "
                    f"or: chmod 700 {shlex.quote(str(path))}"
                )

    def _check_same(self, reference: Reference, items: Sequence[Any]) -> None:
        said = json.loads((self.path / "map.json").read_bytes())
        if said["function"] != str(reference):
            raise ConfigError(f"{self.path} holds the results of {said['function']}, not of {reference}. Give another.")
        if said["items"] != len(items):
            raise ConfigError(
                f"{self.path} was begun with {said['items']:,} items, and now there are {len(items):,}. Give the same, "
                "or another folder."
            )
        data = [pickle.dumps(item, pickle.HIGHEST_PROTOCOL) for item in items]
        if said["checksum"] == _checksum(data):
            return
        with contextlib.closing(self.items()) as kept:
            is_same = _same(kept, items)
        if not is_same:
            raise ConfigError(f"{self.path} was begun with other items. Give the same, or another folder.")


class Items:
    """The items of a map, one at a time: a worker reads those it needs."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        (self._count,) = _COUNT.unpack(self._file.read(_COUNT.size))
        self._ends = memoryview(self._file.read(_COUNT.size * (self._count + 1))).cast("Q")
        self._start = _COUNT.size * (self._count + 2)

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, index: int) -> Any:
        begin, end = self._ends[index], self._ends[index + 1]
        data = os.pread(self._file.fileno(), end - begin, self._start + begin)
        return pickle.loads(data)  # noqa: S301  # from our own folder

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _packed(data: Sequence[bytes]) -> bytes:
    ends, end = [0], 0
    for each in data:
        end += len(each)
        ends.append(end)
    return _COUNT.pack(len(data)) + struct.pack(f"<{len(ends)}Q", *ends) + b"".join(data)


def _checksum(data: Sequence[bytes]) -> int:
    total = 0
    for each in data:
        total = zlib.crc32(each, total)
    return total


def _same(kept: Items, items: Sequence[Any]) -> bool:
    """Return whether the items are equal: a set is pickled in another order each time."""
    try:
        return all(bool(kept[index] == item) for index, item in enumerate(items))
    except Exception:  # such as arrays, which have no one answer
        return False

"""What has been done, so that it is never done again: append-only files of whole records.

1. Each process that runs tasks writes a journal of its own: one writer a file, a new file each time one starts.
2. A record is written when its task has ended, by one write: length and checksum of what follows, the task's index,
   whether it failed, its seconds, then the pickled result, or failure.
3. Whoever wants to know reads all files. A record that is cut short or does not match its checksum ends its file: the
   process was killed at that moment, and the task counts as not done.
4. If a task was run twice (its node was given up, and was alive), the first record counts, by the files' names.

Example: a worker is killed while it appends its 8th result of 100 bytes. The next start reads 7 records of 133 bytes,
then 60 bytes of one that says it is 125 long, and runs that task again.
"""

import os
import struct
import time
import uuid
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_HEAD = struct.Struct("<II")
_BODY = struct.Struct("<QBd")
SYNC_S = 2.0
"""How often a journal is brought to the disk: a power cut costs so much work; a killed process nothing."""
SUFFIX = ".journal"


@dataclass(frozen=True)
class Record:
    """One task's end: `data` is the result, or the Failure, pickled."""

    index: int
    has_failed: bool
    seconds: float
    data: bytes


class Journal:
    """The journal that this process writes, in `folder`; the file is made with the first record."""

    def __init__(self, folder: Path, holder: str) -> None:
        self.path = folder / f"{holder}-{uuid.uuid4().hex[:8]}{SUFFIX}"
        self._file, self._num_bytes = -1, 0
        self._synced_s = time.monotonic()

    def append(self, record: Record) -> None:
        """Write a record, whole or, where there is no room for it, not at all."""
        if self._file < 0:
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        body = _BODY.pack(record.index, record.has_failed, record.seconds) + record.data
        self._write(_HEAD.pack(len(body), zlib.crc32(body)) + body)
        if time.monotonic() - self._synced_s > SYNC_S:
            os.fsync(self._file)
            self._synced_s = time.monotonic()

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError:
            os.ftruncate(self._file, self._num_bytes)  # nobody would read what comes behind half a record
            raise
        self._num_bytes += len(data)

    def close(self) -> None:
        """Close it. What a power cut may still take away is the work of seconds."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class Journals:
    """The journals of a folder, read as they grow: all, or those of one holder, whose names begin with `of`."""

    def __init__(self, folder: Path, *, of: str = "") -> None:
        self._folder, self._of = folder, of
        self._read: dict[str, int] = {}

    def news(self) -> Iterator[Record]:
        """Yield the records that were added since, file by file in the order of their names."""
        names = (entry.name for entry in os.scandir(self._folder) if entry.name.endswith(SUFFIX))
        for name in sorted(name for name in names if name.startswith(self._of)):
            path, start = self._folder / name, self._read.get(name, 0)
            if path.stat().st_size > start:
                with path.open("rb") as file:
                    file.seek(start)
                    data = file.read()
                for record, end in records(data):
                    self._read[name] = start + end
                    yield record


def records(data: bytes) -> Iterator[tuple[Record, int]]:
    """Yield the whole records at the beginning of `data`, and where each ends."""
    position, view = 0, memoryview(data)
    while position + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, position)
        body = view[position + _HEAD.size : position + _HEAD.size + length]
        if len(body) < length or length < _BODY.size or zlib.crc32(body) != checksum:
            return
        index, has_failed, seconds = _BODY.unpack_from(body)
        position += _HEAD.size + length
        yield Record(index, bool(has_failed), seconds, bytes(body[_BODY.size :])), position


def done_tasks(folder: Path) -> set[int]:
    """Return the indices of the tasks that have a result."""
    return {record.index for record in Journals(folder).news() if not record.has_failed}

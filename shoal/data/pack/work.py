"""One group of a source's slices -> parts. Several processes do this at once, each with a group of its own.

1. Read samples, many at a time where the source can, and encode them: a block of rows.
2. Append the block's rows to the part until one would take it beyond `part_bytes`; write the part, begin the next.
   Columns whose place in the part's file is known go there at once (part_file.py, part_stream.py). Most places depend
   on how many rows the part will have: all that the source has left, if they fit; fewer if all take the same bytes.
3. When a part is on the disk, write into the journal that it is there, and how far the source has been read.
4. After each slice, see whether the source is still what it was when reading began.

Parts begin and end with a group, and within it depend on the rows alone: the bytes of a pack do not depend on who
wrote it.

Example: parts of at most 256 MB, a group of three slices with 100 MB each: one part of 256 MB, one of 44 MB.
"""

import dataclasses
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from shoal.core.errors import DataError
from shoal.data.pack.encode import Block, Encoded, Sample
from shoal.data.pack.encoding import Encoding
from shoal.data.pack.journal import Journal, Progress
from shoal.data.pack.manifest import Part, part_file
from shoal.data.pack.part_buffers import PartBuffers
from shoal.data.pack.part_file import places, write_part
from shoal.data.pack.progress import Tell, Teller
from shoal.data.pack.schema import Column, stored_columns

MOST_EXAMPLES = 5


@dataclass(frozen=True)
class Group:
    """Slices that follow each other."""

    number: int
    slices: tuple[Any, ...]
    part_bytes: int
    """What a part of it may take at most."""
    about_bytes: int
    """What the group takes, as far as the source can tell."""


@dataclass(frozen=True)
class Recipe:
    """What every process that writes must know."""

    folder: Path
    columns: tuple[Column, ...]
    block_rows: dict[str, int]
    is_strict: bool
    """Whether a sample that does not fit ends it all."""
    threads: int
    sync: bool
    """Whether a part counts as finished only when it is on the disk."""

    def buffers(self) -> PartBuffers:
        """Return empty buffers for parts."""
        return PartBuffers(stored_columns(self.columns))


def write_group(
    source: Any,
    group: Group,
    recipe: Recipe,
    *,
    buffers: PartBuffers,
    tell: Tell,
    samples: Iterator[Sample] | None = None,
    fingerprint: str = "",
) -> Progress:
    """Pack a group, going on where the journal says; return what it then says.

    `buffers` are empty, and may have been another group's. `samples` are those of the group's only slice, if some of
    them had to be read before, and `fingerprint` is what it had then.
    """
    known = (fingerprint,) if samples is not None else tuple(source.fingerprint(part) for part in group.slices)
    with (
        Encoding(recipe.columns, is_strict=recipe.is_strict, threads=recipe.threads) as encoding,
        _Writer(source, group, recipe, buffers=buffers, tell=tell, fingerprints=known) as writer,
    ):
        while not writer.progress.is_done:
            part = group.slices[writer.progress.slice]
            for encoded in encoding.encoded(source, part, first=writer.progress.samples, samples=samples):
                writer.take(encoded)
            writer.end_slice()
        writer.finish()
        return writer.progress


class _Writer:
    """The parts of one group."""

    def __init__(
        self,
        source: Any,
        group: Group,
        recipe: Recipe,
        *,
        buffers: PartBuffers,
        tell: Tell,
        fingerprints: tuple[str, ...],
    ) -> None:
        self._source, self._group, self._recipe = source, group, recipe
        self._pen, self._disk = ThreadPoolExecutor(1), ThreadPoolExecutor(1)  # one writes, one waits for the disk
        self._journal = Journal(recipe.folder)
        self._buffers = buffers
        self._teller = Teller(tell)
        self._syncing: Future[None] | None = None
        self.progress = self._journal.read(group.number)
        if self.progress.fingerprints != fingerprints or not all(fingerprints):
            self._journal.forget(group.number)
            self.progress = Progress(fingerprints=fingerprints)
        self._teller.tell(self.progress.num_rows, self.progress.num_bytes)

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, *error: object) -> None:
        self._buffers.clear()
        for threads in (self._pen, self._disk):
            threads.shutdown()

    def take(self, encoded: Encoded) -> None:
        """Append the rows, part by part; a block's samples count as read when their rows are in a part."""
        block, begin = encoded.block, 0
        before = self.progress
        ends = np.cumsum(block.row_bytes())
        while begin < block.num_rows:
            if self._buffers.num_rows == 0:
                self._begin(block)
            done = int(ends[begin - 1]) if begin else 0
            room = self._group.part_bytes - self._buffers.num_bytes
            end = int(ends.searchsorted(done + room, side="right"))
            if end == begin and self._buffers.num_rows == 0:
                end = begin + 1  # a row larger than a part has one for itself
            if end > begin:
                num_bytes = int(ends[end - 1]) - done
                self._buffers.append(block, begin, end, num_bytes)
                self._teller.tell(end - begin, num_bytes)
                samples = int(encoded.kept[end - 1]) + 1
                self._read(before, encoded, samples=samples, skipped=samples - end)
            if end < block.num_rows:
                self._write()
            begin = end
        self._read(before, encoded, samples=encoded.samples, skipped=len(encoded.errors))

    def _read(self, before: Progress, encoded: Encoded, *, samples: int, skipped: int) -> None:
        self.progress = dataclasses.replace(
            self.progress,
            samples=before.samples + samples,
            skipped=before.skipped + skipped,
            examples=(*before.examples, *encoded.errors[:skipped])[:MOST_EXAMPLES],
        )

    def _begin(self, block: Block) -> None:
        """Begin a part whose first rows are of this block."""
        buffers, group, rows = self._buffers, self._group, self._expected_rows(block)
        if found := places(buffers.stored, rows):
            buffers.stream(self._recipe.folder / part_file(self._name(), "none"), found, rows, self._pen)
        buffers.reserve(block, min(group.part_bytes, group.about_bytes))

    def _expected_rows(self, block: Block) -> int | None:
        """Return how many rows the next part will have, if they are like those of this block; None: who knows."""
        counts: list[Any] = [getattr(part, "num_rows", None) for part in self._group.slices[self.progress.slice :]]
        left = 0 if None in counts else sum(counts) - self.progress.samples
        most = max(1, int(self._group.part_bytes // max(1.0, block.row_bytes().mean())))
        return min(left, most) if left > 0 and (left <= most or block.is_fixed) else None

    def end_slice(self) -> None:
        """Go to the next slice, if the source is still the same."""
        progress = self.progress
        part, before = self._group.slices[progress.slice], progress.fingerprints[progress.slice]
        now = self._source.fingerprint(part)
        if now != before:
            self._wait()
            self._journal.forget(self._group.number)
            raise DataError(
                f"the source has changed while it was read ({_changed(part, before, now)}). "
                "Run the same shoal pack again when nobody writes to it: what is finished of the rest is kept."
            )
        is_done = progress.slice + 1 == len(self._group.slices)
        self.progress = dataclasses.replace(progress, slice=progress.slice + 1, samples=0, is_done=is_done)

    def finish(self) -> None:
        """Write the last part, and have all of them on the disk."""
        if self._buffers.num_rows:
            self._write()
        self._wait()
        self._journal.write(self._group.number, self.progress)
        self._teller.flush()

    def _write(self) -> None:
        part = write_part(self._recipe.folder, self._name(), self._buffers, self._recipe.block_rows)
        self._buffers.clear()
        self.progress = dataclasses.replace(self.progress, parts=(*self.progress.parts, part))
        self._wait()
        self._syncing = self._disk.submit(self._settle, part, self.progress)

    def _name(self) -> str:
        return f"{self._group.number:05d}-{len(self.progress.parts):05d}"

    def _settle(self, part: Part, progress: Progress) -> None:
        """Have a part on the disk, then in the journal; meanwhile the next one is being made."""
        for file in part.files if self._recipe.sync else ():
            handle = os.open(self._recipe.folder / file.name, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        self._journal.write(self._group.number, progress)

    def _wait(self) -> None:
        if self._syncing is not None:
            self._syncing.result()
            self._syncing = None


def _changed(part: Any, before: str, now: str) -> str:
    """Return which file of a slice has changed, where its fingerprint has something for each."""
    items, stamps = getattr(part, "items", ()), list(zip(before.split(";"), now.split(";"), strict=False))
    if len(items) == len(stamps):
        items = [name for name, (first, last) in zip(items, stamps, strict=True) if first != last] or items
    return f"{items[0]}{' ...' if len(items) > 1 else ''}" if items else repr(part)

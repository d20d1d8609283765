"""Reading a pack: columns as views of the mapped files.

Opening reads the manifest alone. A part's file is mapped when something of it is first asked for; what the manifest
says of it (its size, rows, columns) is checked then, so that no later read can leave the map. Whether its bytes are
still those that were written is for `shoal pack --check`.
"""

import mmap
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError, did_you_mean
from shoal.core.fork_lock import ForkLock
from shoal.data.pack.arrow_file import Buffers, find_buffers
from shoal.data.pack.damaged import is_shape, text_of, wrong_shape
from shoal.data.pack.manifest import Manifest, PartFile, read_manifest
from shoal.data.pack.schema import Column, Stored, stored_columns

Locate = Callable[[int, str], Path]
"""(number of a part, name of its file) -> where that file is; it may wait until it is there."""


class Reading(NamedTuple):
    """How a pack will be read."""

    is_scattered: bool = False
    """Small rows at random."""
    fits: bool = True
    """Memory can hold all of it."""


class Pack:
    """A pack's columns, part by part. Cheap to open, safe in threads, picklable (a copy opens the same path)."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        locate: Locate | None = None,
        arriving: Callable[[], object] | None = None,
    ) -> None:
        """`arriving` is of a pack that is being staged; see Staged.arriving."""
        self.path = Path(path)
        self.manifest: Manifest = read_manifest(self.path)
        self.num_rows = self.manifest.num_rows
        self.columns = _chosen(self.manifest, columns, self.path)
        self._asked = columns
        self._locate, self.arriving = locate, arriving
        self.reading = Reading()
        self._every = stored_columns(self.manifest.columns)
        self._stored = {stored.name: stored for stored in self._every}
        self._first_rows = np.array(self.manifest.first_rows, dtype=np.int64)
        self._lock = ForkLock()
        self._maps: dict[tuple[int, str], mmap.mmap] = {}
        self._parts: dict[int, dict[str, Buffers]] = {}
        self._of_thread = threading.local()

    def __len__(self) -> int:
        return self.num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.path, self._asked, self._locate, self.arriving, self.reading)

    def part_of(self, rows: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the part of each row, and its row in that part."""
        parts = np.searchsorted(self._first_rows, rows, side="right") - 1
        return parts, rows - self._first_rows[parts]

    def values(self, part: int, column: str) -> NDArray[Any]:
        """Return a view of a column of a part: [rows, *shape] where rows are of one size, else all elements in a row.

        Booleans come as bool, bfloat16 as uint16. Of uncompressed columns only: those of others come in blocks.
        """
        return self._uncompressed(part, column).values

    def offsets(self, part: int, column: str) -> NDArray[np.int64]:
        """Return where each row of a column of variable length begins in `values`, and where the last ends."""
        offsets = self._uncompressed(part, column).offsets
        if offsets is None:
            raise DataError(f"column {column!r} of {self.path} has rows of one size: it has no offsets.")
        return offsets

    def block(self, part: int, column: str, block: int) -> tuple[NDArray[Any], NDArray[np.int64] | None]:
        """Return the values and offsets of a block of `block_rows(column)` rows, decompressed anew at each call."""
        from shoal.data.pack.mapped import buffers_of, get_batch  # Arrow, which is not needed for other columns

        stored = self._named(column)
        reader = self._block_reader(part, stored)
        if not 0 <= block < reader.num_record_batches:
            raise DataError(f"part {part} of {self.path} has {reader.num_record_batches} blocks, not block {block}.")
        rows = self.block_rows(column)
        wanted = min(rows, self.manifest.parts[part].num_rows - block * rows)
        batch = get_batch(reader, block, self._describe(part, stored))
        if batch.num_rows != wanted:
            raise DataError(f"{self._describe(part, stored)}: block {block} has {batch.num_rows} rows, not {wanted}.")
        found = buffers_of(batch.column(0), stored, self._describe(part, stored))
        return found.values, found.offsets

    def block_rows(self, column: str) -> int:
        """Return how many rows of a compressed column are compressed together."""
        compression = self._named(column).compression
        if compression == "none":
            raise DataError(f"column {column!r} of {self.path} is not compressed: it has no blocks.")
        return self.manifest.block_rows[compression]

    def map(self, part: int, column: str) -> mmap.mmap:
        """Return the map of the file that holds a column of a part: to tell the kernel how it will be read."""
        file = self.manifest.parts[part].file(self._named(column).compression)
        path = self._path_of(part, file)
        with self._lock:
            return self._mapped(part, file, path)

    def expect(self, reading: Reading) -> None:
        """Say how it will be read.

        If memory cannot hold it, the kernel shall read no more than what is asked for: by itself it reads up to 8 MB.
        """
        with self._lock:
            self.reading = reading
            for mapped in self._maps.values() if not reading.fits else ():
                _advise_random(mapped)

    def __getitem__(self, row: int) -> dict[str, Any]:
        """Return a sample: NumPy arrays and scalars, bytes, str. Plain and slow: the reference for what is fast."""
        if not -self.num_rows <= row < self.num_rows:
            raise IndexError(f"row {row} of a pack of {self.num_rows:,} rows")
        parts, rows = self.part_of(np.array([row % self.num_rows], dtype=np.int64))
        part, place = int(parts[0]), int(rows[0])
        return {name: self._value(part, column, place) for name, column in self.columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[row] for row in range(self.num_rows))

    def __getitems__(self, rows: Iterable[int]) -> list[dict[str, Any]]:
        """Return several samples."""
        return [self[row] for row in rows]

    def close(self) -> None:
        """Let go of all maps; what views still use of them stays until those are gone."""
        with self._lock:
            self._parts.clear()
            self._maps.clear()
            self._of_thread = threading.local()

    def _uncompressed(self, part: int, column: str) -> Buffers:
        stored = self._named(column)
        if stored.compression != "none":
            raise DataError(f"column {column!r} of {self.path} is compressed ({stored.compression}): read its blocks.")
        found = self._parts.get(part)
        if found is None:
            path = self._path_of(part, self.manifest.parts[part].file("none"))  # unlocked: it may wait for the part
            with self._lock:
                found = self._parts.get(part) or self._open_part(part, path)
        return found[column]

    def _path_of(self, part: int, file: PartFile) -> Path:
        return self._locate(part, file.name) if self._locate else self.path / file.name

    def _open_part(self, part: int, path: Path) -> dict[str, Buffers]:
        held = [stored for stored in self._every if stored.compression == "none"]
        what = self.manifest.parts[part]
        name = str(path)
        mapped = self._mapped(part, what.file("none"), path)
        every = find_buffers(mapped, held, what.num_rows)
        if every is None:
            from shoal.data.pack.mapped import only_batch

            every = only_batch(mapped, held, what.num_rows, name)
        for stored in held:
            count, said = len(every[stored.name].values), what.num_values.get(stored.name, 0)
            if not stored.is_fixed and count != said:
                what_of = f"{name}, column {stored.name!r}"
                raise DataError(f"{what_of} has {count:,} elements, but the manifest says {said:,}.")
        self._parts[part] = every
        return every

    def _mapped(self, part: int, file: PartFile, path: Path) -> mmap.mmap:
        if (part, file.name) not in self._maps:
            self._maps[part, file.name] = _map(path, file)
            if not self.reading.fits:
                _advise_random(self._maps[part, file.name])
        return self._maps[part, file.name]

    def _block_reader(self, part: int, stored: Stored) -> Any:
        """Return this thread's own Arrow reader of one column of a compressed file."""
        from shoal.data.pack.mapped import check_schema, open_arrow

        self.block_rows(stored.name)
        readers = self._of_thread.__dict__.setdefault("readers", {})
        if (part, stored.name) not in readers:
            held = [each for each in self._every if each.compression == stored.compression]
            file = self.manifest.parts[part].file(stored.compression)
            name = str(self.path / file.name)
            mapped = self.map(part, stored.name)
            check_schema(open_arrow(mapped, name).schema, held, name)
            number = [each.name for each in held].index(stored.name)
            readers[part, stored.name] = open_arrow(mapped, name, only_field=number)
        return readers[part, stored.name]

    def _value(self, part: int, column: Column, row: int) -> Any:
        whole = self._row(part, column.name, row)
        if column.kind == "text":
            return text_of(whole.tobytes(), self._sample(part, row, column.name))
        if column.kind in ("bytes", "image"):
            return whole.tobytes()
        if not column.is_fixed and column.ndim > 1:
            shape = self._row(part, f"{column.name}.shape", row).tolist()
            if not is_shape(shape, whole.size):
                raise wrong_shape(shape, whole.size, self._sample(part, row, column.name))
            return whole.reshape(shape)
        return whole

    def _row(self, part: int, name: str, row: int) -> Any:
        if self._stored[name].compression == "none":
            found = self._uncompressed(part, name)
            values, offsets, inside = found.values, found.offsets, row
        else:
            block, inside = divmod(row, self.block_rows(name))
            values, offsets = self.block(part, name, block)
        if offsets is None:
            return values[inside]
        begin, end = int(offsets[inside]), int(offsets[inside + 1])
        if not 0 <= begin <= end <= len(values):
            raise DataError(f"{self._sample(part, row, name)}: its offsets are damaged: from {begin:,} to {end:,}.")
        return values[begin:end]

    def _sample(self, part: int, row: int, name: str) -> str:
        return f"sample {int(self._first_rows[part]) + row} of {self.path}, column {name!r}"

    def _named(self, column: str) -> Stored:
        if column not in self._stored:
            raise DataError(f"{self.path} has no column {column!r}.{did_you_mean(column, list(self._stored))}")
        return self._stored[column]

    def _describe(self, part: int, stored: Stored) -> str:
        return f"{self.path / self.manifest.parts[part].file(stored.compression).name}, column {stored.name!r}"


def open_pack(
    path: str | os.PathLike[str], *, columns: Sequence[str] | None = None, locate: Locate | None = None
) -> Pack:
    """Return the pack at `path`; with `columns`, its samples have only these."""
    return Pack(path, columns=columns, locate=locate)


def _reopen(
    path: Path,
    columns: Sequence[str] | None,
    locate: Locate | None,
    arriving: Callable[[], object] | None,
    reading: Reading,
) -> Pack:
    pack = Pack(path, columns=columns, locate=locate, arriving=arriving)
    pack.reading = reading
    return pack


def _chosen(manifest: Manifest, names: Sequence[str] | None, path: Path) -> dict[str, Column]:
    every = {column.name: column for column in manifest.columns}
    for name in names or []:
        if name not in every:
            raise DataError(f"{path} has no column {name!r}.{did_you_mean(name, list(every))}")
    return every if names is None else {name: every[name] for name in names}


def _advise_random(mapped: mmap.mmap) -> None:
    if hasattr(mmap, "MADV_RANDOM"):
        mapped.madvise(mmap.MADV_RANDOM)


def _map(path: Path, file: PartFile) -> mmap.mmap:
    try:
        with path.open("rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size != file.num_bytes or size == 0:
                raise DataError(f"{path} has {size:,} bytes, but the manifest says {file.num_bytes:,}.")
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing, but the manifest names it. Copy the pack again, or pack it again."
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be mapped: {error.strerror}.") from None

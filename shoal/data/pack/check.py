"""Whether a pack is what its manifest says: every byte of every part is read.

1. The manifest agrees with itself, and names every file that lies in parts/.
2. Each file has the size and the checksum that the manifest says.
3. Each part has the columns and the rows that the manifest says; offsets rise, within their column's values; text is
   UTF-8; shapes give as many elements as there are.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shoal.core.errors import DataError
from shoal.core.host import usable_cores
from shoal.data.pack.checksum import file_checksum
from shoal.data.pack.damaged import first_wrong_bool, first_wrong_shape, first_wrong_text
from shoal.data.pack.manifest import PartFile
from shoal.data.pack.reader import Pack
from shoal.data.pack.schema import Column, stored_columns
from shoal.native.tokens import count_rows

_MOST_PROBLEMS = 100


@dataclass(frozen=True)
class Problem:
    """Something in a pack that is not as it should be."""

    part: str | None
    """Which part, if one."""
    row: int | None
    """The first row of the pack that it concerns, where that is known."""
    what: str

    def __str__(self) -> str:
        return self.what


def check_pack(path: str | Path, *, on_part: Callable[[int, int], None] | None = None) -> list[Problem]:
    """Return what is wrong with the pack at `path`; the first hundred problems.

    `on_part` is called with how many parts have been looked at, and how many there are.
    """
    try:
        pack = Pack(path)
    except DataError as error:
        return [Problem(None, None, str(error))]
    problems = _strangers(pack)
    with ThreadPoolExecutor(usable_cores()) as threads:
        every = threads.map(lambda part: _check_part(pack, part), range(len(pack.manifest.parts)))
        for number, found in enumerate(every, start=1):
            problems += found
            if on_part is not None:
                on_part(number, len(pack.manifest.parts))
    return problems[:_MOST_PROBLEMS]


def _strangers(pack: Pack) -> list[Problem]:
    named = {file.name for part in pack.manifest.parts for file in part.files}
    folder = pack.path / "parts"
    here = sorted(f"parts/{file.name}" for file in folder.iterdir()) if folder.is_dir() else []
    return [Problem(None, None, f"{pack.path / name} is not in the manifest.") for name in here if name not in named]


def _check_part(pack: Pack, part: int) -> list[Problem]:
    what = pack.manifest.parts[part]
    first = pack.manifest.first_rows[part]
    problems = [Problem(what.name, first, why) for file in what.files if (why := _check_file(pack.path, file))]
    if not problems:
        fresh = Pack(pack.path)  # its maps go with it: a pack may be larger than what one process should map
        for row, why in _check_rows(fresh, part):
            problems.append(Problem(what.name, first + row, f"part {what.name}, row {first + row}: {why}"))
    return problems


def _check_file(folder: Path, file: PartFile) -> str | None:
    path = folder / file.name
    try:
        size = path.stat().st_size
        if size != file.num_bytes:
            return f"{path} has {size:,} bytes, but the manifest says {file.num_bytes:,}."
        checksum = file_checksum(path)
    except FileNotFoundError:
        return f"{path} is missing."
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}."
    if checksum != file.checksum:
        return f"{path} is damaged: its checksum is {checksum}, but the manifest says {file.checksum}."
    return None


def _check_rows(pack: Pack, part: int) -> Iterator[tuple[int, str]]:
    """Yield (row of the part, what is wrong there)."""
    for stored in stored_columns(pack.manifest.columns):
        try:
            total = 0
            for begin, values, offsets in _pieces(pack, part, stored.name, stored.compression):
                total += 0 if offsets is None else int(offsets[-1] - offsets[0])
                if offsets is not None and (row := _first_fall(offsets)) is not None:
                    yield (
                        begin + row,
                        f"column {stored.name!r} has offsets that fall, from {offsets[row]:,} to {offsets[row + 1]:,}.",
                    )
                    break
                if values.dtype == np.bool_ and (row := first_wrong_bool(values, offsets)) is not None:
                    yield begin + row, f"column {stored.name!r} has booleans that are neither 0 nor 1."
                    break
            else:
                said = pack.manifest.parts[part].num_values.get(stored.name, 0)
                if total != said:
                    yield 0, f"column {stored.name!r} has {total:,} elements, but the manifest says {said:,}."
        except DataError as error:
            yield 0, str(error)
            return
    for column in pack.manifest.columns:
        yield from _check_values(pack, part, column)


def _pieces(
    pack: Pack, part: int, name: str, compression: str
) -> Iterator[tuple[int, NDArray[Any], NDArray[np.int64] | None]]:
    """Yield a column of a part: (first row, values, offsets), whole or block by block."""
    if compression == "none":
        has_offsets = name in pack.manifest.parts[part].num_values
        yield 0, pack.values(part, name), pack.offsets(part, name) if has_offsets else None
        return
    rows = pack.block_rows(name)
    for block in range(-(-pack.manifest.parts[part].num_rows // rows)):
        values, offsets = pack.block(part, name, block)
        yield block * rows, values, offsets


def _first_fall(offsets: NDArray[np.int64]) -> int | None:
    """Return the first row that ends before it begins."""
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    return int(falls[0]) if falls.size else None


def _check_values(pack: Pack, part: int, column: Column) -> Iterator[tuple[int, str]]:
    """Yield the first value that its kind does not allow."""
    if column.kind == "text":
        for begin, values, offsets in _pieces(pack, part, column.name, column.compression):
            assert offsets is not None
            if _first_fall(offsets) is not None:  # said already
                return
            if (row := first_wrong_text(values, offsets)) is not None:
                yield begin + row, f"column {column.name!r} has text that is not UTF-8."
                return
    counts = pack.manifest.parts[part].packed_rows.get(column.name, [])
    for width, said in zip(pack.manifest.row_widths, counts, strict=bool(counts)):
        offsets = pack.offsets(part, column.name)
        if _first_fall(offsets) is None and (rows := count_rows(offsets, width)) != said:
            yield 0, f"column {column.name!r} fills {rows:,} rows of {width:,} tokens, but the manifest says {said:,}."
    if column.kind == "ragged" and column.ndim > 1:
        lengths = _pieces(pack, part, column.name, column.compression)
        shapes = _pieces(pack, part, f"{column.name}.shape", column.compression)
        for (begin, _, offsets), (_, sizes, places) in zip(lengths, shapes, strict=True):
            assert offsets is not None
            assert places is not None
            if (other := np.flatnonzero(np.diff(places) != column.ndim)).size:
                what = f"column {column.name!r} has shapes that are not of {column.ndim} dimensions."
                yield begin + int(other[0]), what
                return
            shapes_here = sizes[places[0] : places[-1]].reshape(-1, column.ndim)
            if (row := first_wrong_shape(shapes_here, np.diff(offsets))) is not None:
                yield begin + row, f"column {column.name!r} has a shape that its elements do not fill."
                return

"""manifest.json: what a pack holds, written last, so that a folder with a manifest is a whole pack."""

import dataclasses
import json
import re
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import Any

from shoal.core.errors import DataError
from shoal.core.files import write_whole
from shoal.data.pack.schema import COMPRESSIONS, Column, stored_columns

FORMAT = "shoal-pack"
VERSION = 1
NAME = "manifest.json"
WIDTHS = tuple(sorted(width + more for width in (2**power for power in range(9, 18)) for more in (0, 1)))
"""What sequences usually have: 512 to 131,072 tokens, and with the one that is predicted last."""


@dataclass(frozen=True)
class PartFile:
    """One file of a part."""

    name: str
    """Its path in the pack: "parts/00000.arrow"."""
    num_bytes: int
    checksum: str
    """See checksum.py."""


@dataclass(frozen=True)
class Part:
    """A run of rows, and the files that hold them: one for uncompressed columns, one for those of each compression."""

    name: str
    num_rows: int
    files: tuple[PartFile, ...]
    num_values: dict[str, int]
    """Of each stored column of variable length, how many elements all rows have together: tokens, bytes."""
    packed_rows: dict[str, list[int]] = field(default_factory=dict)
    """Of each column of tokens, how many rows its documents fill, of each of the manifest's `row_widths`."""

    def file(self, compression: str) -> PartFile:
        """Return the file of the columns with this compression."""
        wanted = part_file(self.name, compression)
        return next(file for file in self.files if file.name == wanted)


@dataclass(frozen=True)
class Manifest:
    """What a pack holds and how it was made."""

    columns: tuple[Column, ...]
    parts: tuple[Part, ...]
    block_rows: dict[str, int] = field(default_factory=dict)
    """For each compression in use, how many rows are compressed together."""
    made: dict[str, Any] = field(default_factory=dict)
    skipped: int = 0
    """How many samples of the source could not be used."""
    row_widths: tuple[int, ...] = ()
    """Of which widths it is known how many rows documents fill (loading/documents.py). That depends on every one of
    them: a loader that wants other widths looks at all parts first."""

    @property
    def num_rows(self) -> int:
        """The number of samples."""
        return sum(part.num_rows for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """The size of all parts on disk."""
        return sum(file.num_bytes for part in self.parts for file in part.files)

    def packed_rows(self, column: str, width: int) -> list[int] | None:
        """Return how many rows of `width` tokens the documents of each part fill; None where nobody has counted."""
        if width not in self.row_widths or any(column not in part.packed_rows for part in self.parts):
            return None
        at = self.row_widths.index(width)
        return [_count(part.packed_rows[column][at], f"packed_rows of part {part.name}") for part in self.parts]

    @property
    def first_rows(self) -> list[int]:
        """The number of the first row of each part, and the number of rows at the end."""
        return [0, *accumulate(part.num_rows for part in self.parts)]


def part_file(part: str, compression: str) -> str:
    """Return the name of the file of a part that holds the columns with this compression."""
    return f"parts/{part}.arrow" if compression == "none" else f"parts/{part}.{compression}.arrow"


def write_manifest(path: Path, manifest: Manifest) -> None:
    """Write manifest.json into the folder `path`."""
    content = dataclasses.asdict(manifest)
    whole = {"format": FORMAT, "version": VERSION, "num_rows": manifest.num_rows, **content}
    write_whole(path / NAME, json.dumps(whole, indent=1, sort_keys=True, allow_nan=False) + "\n")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of the pack in the folder `path`; what contradicts itself in it is named."""
    file = path / NAME
    try:
        content = json.loads(file.read_text())
    except FileNotFoundError:
        raise DataError(_no_pack(path)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file} cannot be read: {error}. Pack the source again.") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DataError(f"{file} is not the manifest of a pack: its format is not {FORMAT!r}.")
    if content.get("version") != VERSION:
        raise DataError(
            f"{path} is a pack of version {content.get('version')}; this shoal reads version {VERSION}. "
            f"Pack the source again with this shoal, or read it with a newer one."
        )
    try:
        manifest = _manifest(content)
        _check(manifest, content)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError) as error:
        raise DataError(f"{file} is damaged ({type(error).__name__}: {error}). Pack the source again.") from None
    return manifest


def _no_pack(path: Path) -> str:
    if address := re.match(r"([a-z][a-z0-9+.-]+):/+(.*)", str(path)):  # a Path keeps one of its slashes
        url = f"{address[1]}://{address[2]}"
        return f"{url} is an address, and packs are read from folders. Bring it here: shoal.View(stage({url!r}))"
    if path.with_name(f"{path.name}.unfinished").is_dir() and not path.exists():
        return f"{path} is not finished. Run the same shoal pack again: it goes on where it stopped."
    if path.is_dir():
        return f"{path} is not a pack: it has no {NAME}. Make one with: shoal pack {path} {path.name}.pack"
    return f"there is no pack {path}. Make one with: shoal pack SOURCE {path}"


def _manifest(content: dict[str, Any]) -> Manifest:
    return Manifest(
        columns=tuple(_column(column) for column in content["columns"]),
        parts=tuple(
            Part(
                name=str(part["name"]),
                num_rows=_count(part["num_rows"], f"num_rows of part {part['name']}"),
                files=tuple(_file(file) for file in part["files"]),
                num_values={name: _count(each, f"num_values of {name}") for name, each in part["num_values"].items()},
                packed_rows=_packed(part.get("packed_rows", {}), len(content.get("row_widths", ()))),
            )
            for part in content["parts"]
        ),
        block_rows={name: _count(rows, f"block_rows of {name}") for name, rows in content["block_rows"].items()},
        made=dict(content["made"]),
        skipped=_count(content["skipped"], "skipped"),
        row_widths=tuple(_count(width, "a width in row_widths") for width in content.get("row_widths", ())),
    )


def _packed(rows: dict[str, Any], num_widths: int) -> dict[str, list[int]]:
    """Return the counts of a part, as many as there are widths; each is looked at when it is used."""
    if any(not isinstance(counts, list) or len(counts) != num_widths for counts in rows.values()):
        raise DataError(f"packed_rows has not {num_widths} counts, one for each of row_widths.")
    return rows


def _column(column: dict[str, Any]) -> Column:
    sizes = tuple(_count(size, f"a size in the shape of column {column['name']!r}") for size in column["shape"])
    if not isinstance(column["name"], str) or not isinstance(column["extra"], dict):
        raise DataError(f"the column {column['name']!r} has no name, or its extra is {column['extra']!r}.")
    return Column(**{**column, "shape": sizes})


def _file(file: dict[str, Any]) -> PartFile:
    name, num_bytes, checksum = str(file["name"]), file["num_bytes"], file["checksum"]
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise DataError(f"the file {name!r} lies outside the pack. Pack the source again.")
    if not isinstance(checksum, str):
        raise DataError(f"the checksum of {name} is {checksum!r}, not a string of 8 digits.")
    return PartFile(name=name, num_bytes=_count(num_bytes, f"num_bytes of {name}"), checksum=checksum)


def _count(value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**62:
        raise DataError(f"{what} is {value!r}, not a count.")
    return value


def _check(manifest: Manifest, content: dict[str, Any]) -> None:
    """Raise what the manifest contradicts itself in."""
    if content["num_rows"] != manifest.num_rows:
        raise DataError(f"num_rows is {content['num_rows']:,}, but its parts have {manifest.num_rows:,} rows together.")
    if not manifest.columns or not manifest.parts:
        raise DataError("it has no columns or no parts. Pack the source again.")
    names = [column.name for column in manifest.columns]
    if len(set(names)) < len(names):
        raise DataError(f"a column is there twice: {', '.join(names)}.")
    stored_columns(manifest.columns)  # raises where these cannot be together
    used = {column.compression for column in manifest.columns}
    for part in manifest.parts:
        held, wanted = {file.name for file in part.files}, {part_file(part.name, each) for each in used}
        if held != wanted or part.num_rows == 0:
            raise DataError(f"part {part.name} has {part.num_rows} rows in {sorted(held)}, not in {sorted(wanted)}.")
    for compression in used - {"none"}:
        if manifest.block_rows.get(compression, 0) < 1 or compression not in COMPRESSIONS:
            raise DataError(f"block_rows does not say how many rows {compression} has compressed together.")

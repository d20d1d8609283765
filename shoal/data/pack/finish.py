"""The end of packing: the finished parts become a pack, or what failed is put in order."""

import dataclasses
import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.core.errors import DataError, ShoalError
from shoal.core.units import format_bytes
from shoal.data.pack.journal import Journal, Progress
from shoal.data.pack.manifest import NAME, WIDTHS, Manifest, Part, PartFile, part_file, read_manifest, write_manifest
from shoal.data.pack.schema import COMPRESSIONS, Column
from shoal.data.pack.work import MOST_EXAMPLES


def write_down(
    folder: Path,
    columns: Sequence[Column],
    block_rows: dict[str, int],
    progress: Sequence[Progress],
    made: dict[str, Any],
) -> None:
    """Number the parts in the order of the source, and write the manifest."""
    parts = [part for each in progress for part in each.parts]
    skipped = sum(each.skipped for each in progress)
    if not parts:
        raise DataError(
            f"none of the source's {skipped:,} samples could be used, the first because: {_first(progress)}"
        )
    Journal(folder).clean({part.name for part in parts})
    numbered = tuple(_renamed(folder, part, f"{number:05d}") for number, part in enumerate(parts))
    if skipped:
        made = {**made, "skipped": [why for each in progress for why in each.examples][:MOST_EXAMPLES]}
    widths = WIDTHS if any(part.packed_rows for part in numbered) else ()
    write_manifest(folder, Manifest(tuple(columns), numbered, block_rows, made, skipped, widths))


def _first(progress: Sequence[Progress]) -> str:
    return next((why for each in progress for why in each.examples), "there are none.")


def _renamed(folder: Path, part: Part, name: str) -> Part:
    files = []
    for file in part.files:
        compression = next(each for each in COMPRESSIONS if part_file(part.name, each) == file.name)
        new = part_file(name, compression)
        (folder / file.name).rename(folder / new)
        files.append(PartFile(new, file.num_bytes, file.checksum))
    return dataclasses.replace(part, name=name, files=tuple(files))


def give_name(unfinished: Path, path: Path) -> Manifest:
    """Make the pack what it is called, and return its manifest."""
    shutil.rmtree(unfinished / "journal", ignore_errors=True)
    unfinished.rename(path)
    for name in ("recipe.json", "lock"):
        (path / name).unlink(missing_ok=True)
    for folder in (path / "parts", path, path.parent):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    return read_manifest(path)


def disk_error(error: OSError, unfinished: Path) -> ShoalError:
    """Return what to raise for an OSError: a full disk is named, and what has become of the work."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return DataError(f"{error.filename or unfinished}: {error.strerror or error}.")
    full = f"the disk of {unfinished.parent} is full ({format_bytes(_free(unfinished))} free)."
    if error.errno == errno.EFBIG:
        full = f"no file in {unfinished.parent} may be as large as a part (ulimit -f). Smaller parts: --part-size."
    kept = list((unfinished / "journal").glob("*.json"))
    if not kept:
        return DataError(f"{full} Nothing was finished, and nothing is left. Make room, or give another destination.")
    return DataError(
        f"{full} What is finished is kept in {unfinished}: make room and run the same shoal pack again, "
        "and it goes on there; or remove that folder."
    )


def _free(path: Path) -> int:
    return shutil.disk_usage(path).free


def tidy(unfinished: Path) -> None:
    """Remove the unfinished folder unless some part of it is worth keeping."""
    if unfinished.is_dir() and not any((unfinished / "journal").glob("*.json")) and not (unfinished / NAME).exists():
        shutil.rmtree(unfinished, ignore_errors=True)
    elif unfinished.is_dir() and (unfinished / "journal").is_dir():
        journal = Journal(unfinished)
        numbers = [int(file.stem) for file in (unfinished / "journal").glob("*.json")]
        journal.clean({part.name for number in numbers for part in journal.read(number).parts})

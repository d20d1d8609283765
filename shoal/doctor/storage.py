"""Where run folders and temporary files go: what runs do with files must work there."""

import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

from shoal.core.files import write_whole
from shoal.core.units import format_bytes, format_seconds
from shoal.doctor.finding import Finding, ok, problem, warning

_FULL_BYTES, _LITTLE_BYTES = 100 << 20, 5 << 30
"""A run folder with its report takes megabytes; a checkpoint of a billion parameters with Adam 12 GB."""


def check_runs(runs: Path, free_bytes: int | None = None) -> list[Finding]:
    """Do with files in the folder of runs what runs do; `free_bytes` is what the file system has left."""
    folder = _nearest(runs)
    elsewhere = "mend that, or have run folders elsewhere: shoal train FILE --runs DIR"
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix=".shoal-doctor-") as made:
            sync_s = _work(Path(made))
    except OSError as error:
        return [problem("storage", f"{folder}, where run folders go: {error.strerror or error}", elsewhere)]
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    room = f"{folder} has {format_bytes(free)} free"
    if free < _FULL_BYTES:
        return [problem("storage", f"{room}: a run cannot write its events there", elsewhere)]
    if free < _LITTLE_BYTES:
        return [warning("storage", f"{room}: little for checkpoints", elsewhere)]
    if os.statvfs(folder).f_files and os.statvfs(folder).f_favail < 1000:
        return [warning("storage", f"{room}, but room for few more files (inodes)", elsewhere)]
    return [ok("storage", f"{room}; files are written, synced ({format_seconds(sync_s)}), locked and renamed there")]


def check_temporary(folder: Path | None = None) -> list[Finding]:
    """Look whether temporary files can be written."""
    remedy = "export TMPDIR=, with a folder that can be written to and has room"
    try:
        folder = Path(tempfile.gettempdir()) if folder is None else folder
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".shoal-doctor-") as file:
            file.write(b"shoal")
            file.flush()
    except OSError as error:
        return [problem("temporary files", f"none can be written: {error.strerror or error}", remedy)]
    free = shutil.disk_usage(folder).free
    if free < _FULL_BYTES:
        return [warning("temporary files", f"{folder} has only {format_bytes(free)} free", remedy)]
    return [ok("temporary files", f"{folder}, {format_bytes(free)} free")]


def check_tiers() -> list[Finding]:
    """List the storage that packs can be staged to; how fast each is, `shoal stage --tiers` measures."""
    from shoal.data.stage.tiers import places, room

    found = [f"{kind} {folder} (room for {format_bytes(room(folder))})" for folder, kind in places().items()]
    fact = ", ".join(found) or "no storage of this node can be written to, so that no pack is staged"
    return [ok("staging", fact)]


def _work(folder: Path) -> float:
    """Write a file over another, sync, lock and rename, as runs and packs do; return the seconds of the sync."""
    file = folder / "file"
    write_whole(file, "old")
    begin_s = time.perf_counter()
    write_whole(file, "new")
    sync_s = time.perf_counter() - begin_s
    if file.read_text() != "new":
        raise OSError("a file that was written over another by renaming still reads as the old one")
    with file.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    (folder / "unfinished").mkdir()
    (folder / "unfinished").rename(folder / "finished")
    return sync_s


def _nearest(folder: Path) -> Path:
    """Return `folder`, or the nearest above it that is there."""
    resolved = folder.resolve()
    return next(path for path in (resolved, *resolved.parents) if path.is_dir())

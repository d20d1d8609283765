"""A source -> a pack.

1. Cut the source into slices, and put slices that follow each other into groups of about the size of a part.
2. Decide, from some samples, what the columns are and how each is compressed (prepare.py, compression.py).
3. Pack the groups, by processes that each take the next one; a journal keeps what is finished (work.py, pool.py,
   journal.py).
4. When all is there, number the parts, write the manifest, and give the folder its name.

Until step 4 everything is in `DST.unfinished`: DST is a whole pack or nothing. After a crash, the same call goes on
there.

Example: 1,000 files of 1 MB, part_bytes = 256 MB: 4 groups; two processes take one each, then the next; 4 parts,
00000 to 00003, whatever the number of processes.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.core.host import available_memory, usable_cores
from shoal.data.pack.compression import Asked
from shoal.data.pack.finish import disk_error, give_name, tidy, write_down
from shoal.data.pack.journal import Journal, Progress, locked
from shoal.data.pack.manifest import NAME, Manifest, read_manifest
from shoal.data.pack.pool import Unreadable, write_groups
from shoal.data.pack.prepare import Decided, decide
from shoal.data.pack.progress import Report, console_report
from shoal.data.pack.schema import Column
from shoal.data.pack.work import Group, Recipe, write_group

PART_BYTES = 256_000_000
_WORTH_PROCESSES_BYTES = 64_000_000
"""Less is packed before the processes have started."""
_ON_ERROR = ("raise", "skip")


def pack(
    source: Any | Iterable[Mapping[str, Any]],
    dst: str | os.PathLike[str],
    *,
    columns: Sequence[str] | Mapping[str, str] | None = None,
    part_bytes: float = PART_BYTES,
    workers: int | None = None,
    compression: Asked = "auto",
    storage_bytes_per_s: float | None = None,
    on_error: str = "raise",
    restart_blocks: int = 2,
    resume: bool = True,
    sync: bool = True,
    report: Report | None = None,
    **options: Any,
) -> Manifest:
    """Write the samples of `source` as the pack `dst`, and return its manifest.

    `source` is a path or URL of any format that shoal reads (`options` are its own), a dataset, or an iterable of
    mappings. `columns` chooses some of its columns, or says their kinds. What fails leaves no `dst`; parts that were
    finished are kept in `dst.unfinished`, and the same call goes on from there, unless `resume` is False. With `sync`,
    every part is on the disk when this returns; without it, some may still be in memory, as a plain copy leaves them.

    Parts have about `part_bytes`, and are made by `workers` processes, which change no byte of them. `compression` is
    "auto" (measured, for storage of `storage_bytes_per_s` or as fast as that of `dst`), "none", "lz4", "zstd" or
    `{column: ...}`. A sample that does not fit is named (`on_error="raise"`), or left out and counted ("skip"). JPEGs
    get a restart marker every `restart_blocks` blocks, so that crops decode only what they show. `report` is told how
    it goes; without it, stderr.
    """
    report = report or console_report()
    path = _destination(Path(dst))
    _check_options(part_bytes, workers, on_error, restart_blocks)
    opened = _opened(source, columns, options)
    asked = _Asked(columns, int(part_bytes), compression, storage_bytes_per_s, restart_blocks)
    unfinished = path.with_name(f"{path.name}.unfinished")
    _make_folder(unfinished)
    with locked(unfinished) as lock:
        try:
            job = _prepared(opened, unfinished, asked, is_strict=on_error == "raise", resume=resume, report=report)
            job = job and replace(job, sync=sync)
            if job is not None:
                progress = _write_all(opened, job, workers=workers, lock=lock, report=report)
                made = {"source": opened.describe(), "options": asked.as_json(), "shoal": shoal.__version__}
                write_down(unfinished, job.decided.columns, job.decided.block_rows, progress, made)
            return give_name(unfinished, path)
        except OSError as error:
            raise disk_error(error, unfinished) from error
        finally:
            report.end()
            tidy(unfinished)


@dataclass(frozen=True)
class _Asked:
    """What decides over the bytes of a pack, besides its source."""

    columns: Sequence[str] | Mapping[str, str] | None
    part_bytes: int
    compression: Asked
    storage_bytes_per_s: float | None
    restart_blocks: int

    def as_json(self) -> dict[str, Any]:
        columns, compression = self.columns, self.compression
        return {
            "columns": dict(columns) if isinstance(columns, Mapping) else columns and list(columns),
            "part_bytes": self.part_bytes,
            "compression": dict(compression) if isinstance(compression, Mapping) else compression,
            "storage_bytes_per_s": self.storage_bytes_per_s,
            "restart_blocks": self.restart_blocks,
        }


@dataclass(frozen=True)
class _Job:
    """What is to be written."""

    folder: Path
    groups: tuple[Group, ...]
    decided: Decided
    is_strict: bool
    sync: bool = True

    def recipe(self, threads: int) -> Recipe:
        """Return what a process must know, which may use `threads`."""
        decided = self.decided
        return Recipe(self.folder, decided.columns, decided.block_rows, self.is_strict, threads, self.sync)


def _prepared(
    source: Any, folder: Path, asked: _Asked, *, is_strict: bool, resume: bool, report: Report
) -> _Job | None:
    """Return what is to be written; None where a pack lies there that only lacks its name."""
    slices = source.slices(asked.part_bytes)
    if not slices:
        raise DataError("the source has no samples.")
    groups = group_slices(slices, asked.part_bytes)
    journal = Journal(folder)
    key = {"asked": asked.as_json(), "source": source.describe(), "slices": len(slices), "shoal": shoal.__version__}
    old = journal.recipe() if resume else None
    if old is not None and old.get("key") == key and not (is_strict and _has_skipped(folder)):
        if (folder / NAME).exists():
            return None
        decided = _decided(old)
        report.say(f"going on with {folder}.")
    else:
        if old is not None:
            report.say(f"{folder} was begun with other options or another source: starting anew.")
        (folder / NAME).unlink(missing_ok=True)
        decided = decide(
            source,
            groups,
            asked_columns=asked.columns,
            compression=asked.compression,
            restart_blocks=asked.restart_blocks,
            storage_bytes_per_s=asked.storage_bytes_per_s,
            folder=folder,
            say=report.say,
        )
        columns = [asdict(column) for column in decided.columns]
        journal.create({"key": key, "columns": columns, "block_rows": decided.block_rows})
    if is_strict:
        journal.forget_skipped(group.number for group in groups)
    journal.clean({part.name for group in groups for part in journal.read(group.number).parts})
    report.begin(sum(getattr(part, "num_bytes", 0) for part in slices))
    return _Job(folder, tuple(groups), decided, is_strict)


def _has_skipped(folder: Path) -> bool:
    """Return whether a pack lies there that only lacks its name, and some samples."""
    return (folder / NAME).exists() and read_manifest(folder).skipped > 0


def _decided(old: dict[str, Any]) -> Decided:
    columns = tuple(Column(**{**column, "shape": tuple(column["shape"])}) for column in old["columns"])
    return Decided(columns, dict(old["block_rows"]), None)


def group_slices(slices: Sequence[Any], part_bytes: int) -> list[Group]:
    """Return the slices in groups of about `part_bytes`, in order: a group is what one process packs.

    What a source says of its size is about right: a group that should be one part may become a part a quarter larger
    than asked, rather than one of the size asked and a tiny one.
    """
    groups: list[Group] = []
    some: list[Any] = []
    num_bytes = 0
    for number, each in enumerate(slices):
        some.append(each)
        num_bytes += getattr(each, "num_bytes", None) or 2 * part_bytes  # of unknown size: a group for itself
        if num_bytes > part_bytes * 3 / 4 or number + 1 == len(slices):
            limit = part_bytes if num_bytes > part_bytes * 5 / 4 else part_bytes * 5 // 4
            groups.append(Group(len(groups), tuple(some), limit, num_bytes))
            some, num_bytes = [], 0
    return groups


def _write_all(source: Any, job: _Job, *, workers: int | None, lock: int, report: Report) -> list[Progress]:
    room = available_memory() // (3 * max(group.part_bytes for group in job.groups))  # each process holds a part
    most = workers or max(1, min(usable_cores(), room))
    processes = min(most, len(job.groups))
    known = sum(getattr(part, "num_bytes", 0) for group in job.groups for part in group.slices)
    if processes > 1 and job.decided.samples is None and (workers or known > _WORTH_PROCESSES_BYTES):
        recipe = job.recipe(max(1, most // processes))
        try:
            return write_groups(source, job.groups, recipe, workers=processes, lock=lock, tell=report.add)
        except Unreadable as error:
            report.say(f"packing in this process alone: the source cannot be sent to others ({error}).")
    recipe, samples = job.recipe(most), job.decided.samples
    buffers, seen = recipe.buffers(), job.decided.fingerprint
    return [
        write_group(source, group, recipe, buffers=buffers, tell=report.add, samples=samples, fingerprint=seen)
        for group in job.groups
    ]


def _opened(source: Any, columns: Sequence[str] | Mapping[str, str] | None, options: dict[str, Any]) -> Any:
    """Return `source` as something to read slices of; a source that can leave columns out is told which are wanted."""
    if all(hasattr(source, name) for name in ("slices", "read", "fingerprint", "describe")):
        if options:
            raise ConfigError(f"shoal.pack has no option {next(iter(options))!r}, and the source is open already.")
        return source
    from shoal.data.sources.find import open_source

    if columns is None:
        return open_source(source, **options)
    try:
        return open_source(source, columns=list(columns), **options)
    except ConfigError as error:
        if "no option 'columns'" not in str(error):
            raise
        return open_source(source, **options)


def _destination(path: Path) -> Path:
    if path.exists():
        what = "a pack" if (path / NAME).exists() else "something"
        raise ConfigError(f"{path}: there is {what} of that name already. Remove it, or give another name.")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{path}: there is no folder {path.absolute().parent}.")
    return path


def _check_options(part_bytes: float, workers: int | None, on_error: str, restart_blocks: int) -> None:
    if part_bytes < 1:
        raise ConfigError(f"part_bytes={part_bytes:g}: a part has some bytes. The usual is {PART_BYTES:,}.")
    if workers is not None and workers < 1:
        raise ConfigError(f"workers={workers}: give 1 or more.")
    if on_error not in _ON_ERROR:
        raise ConfigError(f"on_error={on_error!r}: give 'raise' or 'skip'.")
    if restart_blocks < 0:
        raise ConfigError(f"restart_blocks={restart_blocks}: give 0 (none) or more.")


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None

"""The storage of this node by how long it keeps what is written, and results brought out of what is erased.

1. Sites name their storage by variables: $SLURM_TMPDIR (erased with the job), $SCRATCH (erased after some weeks),
   $PROJECT and $HOME (kept). Memory (/dev/shm) and the folders of temporary files are the node's.
2. A folder is erased with the job if it lies in one that the site made for this job: those variables that are only set
   for that, a $TMPDIR with the job's number in it, and memory, which is the job's. A plain /tmp is the node's own, and
   lasts until somebody clears it.
3. `copied_out` copies a folder of results out of storage that is erased, when its block is left, however that is: to a
   hidden folder beside its place first, then by one rename.

Example: job 4711 has SLURM_TMPDIR=/local/4711. `shoal train train.py --runs $SLURM_TMPDIR/runs`, started in
/home/me/work, trains in /local/4711/runs/train-1; at the end, or after an error, this is at /home/me/work/runs/train-1.
"""

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import CheckpointError, ConfigError
from shoal.data.stage.tiers import MEASURE_S, is_shared, room
from shoal.data.storage import measure_storage

JOB, NODE, WEEKS, KEPT = "job", "node", "weeks", "kept"
IN_WORDS = {
    JOB: "erased with the job",
    NODE: "the node's, until cleared",
    WEEKS: "erased after some weeks",
    KEPT: "kept",
}
_OF_A_JOB = ("SLURM_TMPDIR", "LOCAL_SCRATCH", "LSCRATCH", "JOBFS")
_NAMED = {"TMPDIR": NODE, "SCRATCH": WEEKS, "WORK": WEEKS, "PROJECT": KEPT, "HOME": KEPT}
_MEMORY = "/dev/shm"  # noqa: S108  it is looked at, not written to


@dataclass(frozen=True)
class Place:
    """Storage that this process can write to."""

    name: str
    """What the site calls it, as $SCRATCH."""
    path: Path
    lifetime: str
    size_bytes: int
    room_bytes: int
    """What may be put there; see tiers.room."""
    read_bytes_per_s: float | None
    """None where it could not be measured."""
    is_shared: bool
    """Whether other nodes see the same."""


def known_places(env: Mapping[str, str] = os.environ) -> dict[Path, tuple[str, str]]:
    """Return the folders that are known here by a name: each with that name and how long it keeps what is written."""
    named = [(f"${name}", env.get(name, ""), JOB) for name in _OF_A_JOB]
    named.append((_MEMORY, _MEMORY, JOB if "SLURM_JOB_ID" in env else NODE))
    named += [(f"${name}", env.get(name, ""), lifetime) for name, lifetime in _NAMED.items()]
    named.append((tempfile.gettempdir(), tempfile.gettempdir(), NODE))
    found: dict[Path, tuple[str, str]] = {}
    for name, folder, lifetime in named:
        path = Path(folder or os.devnull)
        if path.is_dir() and os.access(path, os.W_OK | os.X_OK):
            is_of_job = name == "$TMPDIR" and env.get("SLURM_JOB_ID", "no job") in re.findall(r"\d+", folder)
            found.setdefault(path.resolve(), (name, JOB if is_of_job else lifetime))
    return found


def lifetime_of(folder: Path, env: Mapping[str, str] = os.environ) -> str:
    """Return how long `folder` keeps what is written: job, node, weeks or kept. Of an unknown one, kept."""
    known = known_places(env)
    resolved = folder.resolve()
    return next((known[path][1] for path in (resolved, *resolved.parents) if path in known), KEPT)


def measured_places(*, seconds: float = MEASURE_S, env: Mapping[str, str] = os.environ) -> list[Place]:
    """Return the known storage, fastest first; each file system is measured once, for so many `seconds`."""
    rates: dict[int, float | None] = {}
    found = []
    for path, (name, lifetime) in known_places(env).items():
        device = path.stat().st_dev
        if device not in rates:
            rates[device] = _rate(path, seconds)
        size = shutil.disk_usage(path).total
        found.append(Place(name, path, lifetime, size, room(path), rates[device], is_shared(path)))
    return sorted(found, key=lambda place: -(place.read_bytes_per_s or 0.0))


@contextlib.contextmanager
def copied_out(
    folder: Path,
    *,
    say: Callable[[str], object],
    to: Path | None = None,
    env: Mapping[str, str] = os.environ,
) -> Iterator[Path]:
    """Have `folder`, which this block fills, out of storage that is erased with the job when the block is left.

    Yields where it will be: itself, where it is not erased. `to` is the folder that it is put into; without, `runs` in
    the current folder, in the one that the job was submitted from, or at home: the first that is kept.
    """
    if lifetime_of(folder, env) != JOB:
        yield folder
        return
    target = _free(_kept_folder(to, env) / folder.resolve().name)
    say(f"{folder} is erased with the job. At the end it is copied to {target}.")
    try:
        yield target
    except BaseException:
        with contextlib.suppress(CheckpointError):  # the other error is the one to show
            _bring(folder, target, say)
        raise
    _bring(folder, target, say)


def copy_whole(source: Path, target: Path) -> None:
    """Copy a folder so that there is all of it, or nothing, under the name `target`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.", ignore_cleanup_errors=True) as made:
        shutil.copytree(source, Path(made, target.name), symlinks=True)
        _sync(Path(made, target.name))
        Path(made, target.name).rename(target)


def _bring(folder: Path, target: Path, say: Callable[[str], object]) -> None:
    if not folder.exists():
        return  # it came to nothing
    try:
        copy_whole(folder, target)
    except (OSError, shutil.Error) as error:
        sentence = f"{folder} is erased with the job, and could not be copied to {target}: {error}."
        say(sentence)
        raise CheckpointError(sentence) from None
    say(f"{folder} was copied to {target}.")


def _kept_folder(to: Path | None, env: Mapping[str, str]) -> Path:
    if to is not None:
        if lifetime_of(to, env) == JOB:
            raise ConfigError(f"{to} is erased with the job, too. Give a folder that is kept.")
        return to
    bases = [str(Path.cwd()), env.get("SLURM_SUBMIT_DIR", ""), env.get("HOME", "")]
    for base in bases:
        if base and lifetime_of(Path(base), env) != JOB and os.access(base, os.W_OK | os.X_OK):
            return Path(base) / "runs"
    raise ConfigError("the results are erased with the job, and no folder that is kept can be written to. Give one.")


def _free(target: Path) -> Path:
    """Return `target`, or the first of target-2, target-3, ... that is not there."""
    number, found = 1, target
    while found.exists():
        number += 1
        found = target.with_name(f"{target.name}-{number}")
    return found


def _sync(folder: Path) -> None:
    """Have the files of `folder` on the disk before it gets its name: the node may go down right after the job."""
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)


def _rate(path: Path, seconds: float) -> float | None:
    try:
        return measure_storage(path, seconds=seconds).read_bytes_per_s
    except ConfigError:  # full, or broken
        return None

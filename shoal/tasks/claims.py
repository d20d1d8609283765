"""Bunches that jobs take from the folder, each by exactly one: a file that is renamed.

1. A bunch is a file in `open/`, a list of task indices. Its name says its place and how often it was given back.
2. A job takes it by renaming it into `taken/`, with its own name behind: of two jobs, one rename succeeds.
3. When its tasks are done, the job removes it. What it cannot finish it gives back: renamed into `open/`, one more
   in its name; whoever takes such a one first looks up which of its tasks are done.
4. The bunches of a job that has died are given back by the submitting side, when Slurm says that the job has ended, or
   by the job itself, when Slurm has started it anew. A job whose bunch has been taken away leaves it alone.

Example: open/0007-0.bunch, taken/0007-0.bunch@12_3@0@node4-811 (job 12_3, first start), and open/0007-1.bunch later.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import WorkerFailed
from shoal.core.looks import Looks
from shoal.tasks.folder import TaskFolder
from shoal.tasks.journal import done_tasks

_SUFFIX = ".bunch"
_SOONEST_S, _LATEST_S, _MOST_LOOKS = 0.01, 2.0, 25
"""A folder that is shared over a network may list for half a minute what has been moved."""
_OPEN, _TAKEN = f"[0-9]*{_SUFFIX}", f"[0-9]*{_SUFFIX}@*"  # not those that are being written


@dataclass(frozen=True)
class Holder:
    """Who has taken a bunch: a job, the count of its starts, and a name for the process."""

    job: str
    start: int
    process: str

    def __str__(self) -> str:
        return f"{self.job}@{self.start}@{self.process}"


@dataclass(frozen=True)
class Bunch:
    """A bunch that this process has taken."""

    path: Path
    tasks: list[int]

    def is_ours(self) -> bool:
        """Return whether nobody has taken it away."""
        return self.path.exists()

    def finish(self) -> None:
        """Remove it: its tasks are done."""
        self.path.unlink(missing_ok=True)


def offer(folder: TaskFolder, number: int, tasks: Sequence[int]) -> None:
    """Put a bunch out for jobs to take; lower numbers go first."""
    path = folder.open / f"{number:06d}-0{_SUFFIX}"
    # Not write_whole: that waits for the disk, and there may be a thousand. One that a power cut takes is planned anew.
    hidden = path.with_name(f".{path.name}")
    hidden.write_text(json.dumps(list(tasks)))
    hidden.rename(path)


def take(folder: TaskFolder, holder: Holder) -> Bunch | None:
    """Return a bunch that is now this holder's; None where there is none."""
    for path in sorted(folder.open.glob(_OPEN)):
        target = folder.taken / f"{path.name}@{holder}"
        try:
            path.rename(target)
        except FileNotFoundError:  # another was faster; or a network file system lost the answer
            if not target.exists():
                continue
        tasks = json.loads(target.read_bytes())
        if not path.name.endswith(f"-0{_SUFFIX}"):
            done = done_tasks(folder.done)
            tasks = [task for task in tasks if task not in done]
        return Bunch(target, tasks)
    return None


def give_back(folder: TaskFolder, path: Path) -> None:
    """Put a taken bunch out again."""
    name = path.name.partition("@")[0].removesuffix(_SUFFIX)
    number, _, given = name.partition("-")
    with contextlib.suppress(FileNotFoundError):  # somebody else did
        path.rename(folder.open / f"{number}-{int(given) + 1}{_SUFFIX}")


def taken(folder: TaskFolder) -> Iterator[tuple[Path, Holder]]:
    """Yield the bunches that are taken, and by whom."""
    for path in folder.taken.glob(_TAKEN):
        _, job, start, process = path.name.split("@", 3)
        yield path, Holder(job, int(start), process)


def give_back_of(folder: TaskFolder, is_dead: Callable[[Holder], bool]) -> int:
    """Put out again what dead holders had taken; return how many bunches."""
    paths = [path for path, holder in taken(folder) if is_dead(holder)]
    for path in paths:
        give_back(folder, path)
    return len(paths)


def wipe(folder: TaskFolder) -> None:
    """Remove all bunches. Called when no job lives that could hold one."""
    for path in [*folder.open.glob(_OPEN), *folder.taken.glob(_TAKEN)]:
        path.unlink(missing_ok=True)


def count_open(folder: TaskFolder) -> int:
    """Return how many bunches wait to be taken."""
    return sum(1 for _ in folder.open.glob(_OPEN))


def covered(folder: TaskFolder) -> set[int]:
    """Return the tasks of all bunches that are open or taken, and of some that were done meanwhile."""
    known: dict[str, list[int]] = {}
    looks = Looks(_SOONEST_S, _LATEST_S)
    for _ in range(_MOST_LOOKS):
        time.sleep(looks.left_s())
        looks.is_due()
        paths = {_number(path): path for path in (*folder.open.glob(_OPEN), *folder.taken.glob(_TAKEN))}
        for number in paths.keys() - known.keys():
            with contextlib.suppress(FileNotFoundError):  # taken, or done, while we looked
                known[number] = json.loads(paths[number].read_bytes())
        if paths.keys() <= known.keys():
            return {task for tasks in known.values() for task in tasks}
    raise WorkerFailed(f"{folder.path} lists bunches that are not there, time and again. Is its file system well?")


def next_number(folder: TaskFolder) -> int:
    """Return a number behind those of all bunches."""
    paths = [*folder.open.glob(_OPEN), *folder.taken.glob(_TAKEN)]
    return max((int(_number(path)) for path in paths), default=-1) + 1


def _number(path: Path) -> str:
    """Return which bunch it is, whoever has it and however often it was given back."""
    return path.name.partition("-")[0]

"""How many tasks become a few jobs of sensible length: arithmetic, without files or Slurm.

1. `spread` names the few tasks that are run first, and `predict` what all take by those: their mean, or in proportion
   to the items' sizes where these are known.
2. `at_once` says how many tasks a node runs side by side: by cores, memory and GPU memory.
3. `plan_jobs`: jobs of about 7.5 minutes; fewer and longer ones where that would be more than the site takes; more and
   shorter ones where the user wants more tasks at once, but none shorter than 10 s.
4. `pack` fills bunches one after the other, the longest tasks first. Jobs take one bunch after the other, so that a
   slow job takes fewer, and what one leaves runs in another. Bunches get smaller: each round of them, one a job, is
   half of the work that is left, so that all jobs end at about the same time.

Example: 5,000 tasks of 20 ms are 100 s of work; with 2 tasks at once in a job and 4 wanted, 2 jobs of 25 s, and bunches
of 1,250 tasks (12.5 s), 1,250, 625, 625, ... 100,000 tasks of 30 s, 8 at once: 834 jobs of 7.5 minutes; if the site
takes 200, they last 31 minutes.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.core.errors import ConfigError
from shoal.core.units import format_seconds

BUNCH_S = 450.0
"""What a job should last: long beside the seconds that it takes to start, short beside anybody's wait in a queue."""
SHORTEST_JOB_S = 10.0
SHORTEST_BUNCH_S = 0.5
ROUNDS = 6
"""Of bunches: the last are a 64th of a job's work."""
JOB_START_S = 0.093
"""What a scheduler needs to start a job: 100 trivial elements of an array took 9.3 s (Slurm 22.05, 8 CPUs)."""
MOST_SMALL_BUNCHES = 500
_MARGIN = 1.5
_STARTING_S = 60.0


@dataclass(frozen=True)
class Room:
    """What a task needs, or a node has; 0: nothing, or not known."""

    cores: int = 1
    memory_bytes: float = 0
    gpu_memory_bytes: float = 0
    """Of a node: of all its GPUs together."""
    gpus: int = 0
    """Of a node alone: tasks are placed on whole GPUs, or on parts of one."""


@dataclass(frozen=True)
class JobPlan:
    """So many jobs, of so many seconds at most."""

    jobs: int
    time_s: int


def spread(count: int, few: int) -> list[int]:
    """Return `few` of `count` indices, evenly spread: neighbours are often alike."""
    few = min(few, count)
    return sorted({(2 * number + 1) * count // (2 * few) for number in range(few)})


def predict(
    measured: Mapping[int, float], tasks: Sequence[int], sizes: Sequence[float] | None = None
) -> dict[int, float]:
    """Return the seconds that each of `tasks` will take, by those measured: their mean, or by the items' sizes."""
    assert measured, "something must have been measured"
    if sizes is None or sum(sizes[task] for task in measured) <= 0:
        mean_s = sum(measured.values()) / len(measured)
        return dict.fromkeys(tasks, mean_s)
    per_size_s = sum(measured.values()) / sum(sizes[task] for task in measured)
    return {task: per_size_s * sizes[task] for task in tasks}


def at_once(node: Room, task: Room) -> int:
    """Return how many tasks fit a node side by side; ConfigError where not even one does."""
    fits = [node.cores // task.cores, *_by_gpus(node, task)]
    if task.memory_bytes > 0 and node.memory_bytes > 0:
        fits.append(int(node.memory_bytes // task.memory_bytes))
    if min(fits) < 1:
        raise ConfigError(f"a task needs {_shown(task)}, and a node has {_shown(node)}. Ask for less a task.")
    return min(fits)


def _by_gpus(node: Room, task: Room) -> list[int]:
    """Return how many tasks the GPUs have room for, if that is known: several on one, or one on several.

    Example: on 4 GPUs of 80 GB fit 12 tasks of 25 GB (3 on each), 4 of 50 GB, and 2 of 100 GB. Without --gpu-memory,
    each has a GPU of its own.
    """
    gpus, needed = node.gpus, task.gpu_memory_bytes
    if needed <= 0 or node.gpu_memory_bytes <= 0:
        return [gpus] if gpus else []
    of_one = node.gpu_memory_bytes / max(1, gpus)
    return [max(1, gpus) * int(of_one // needed) if needed <= of_one else gpus // math.ceil(needed / of_one)]


def plan_jobs(
    total_s: float,
    longest_s: float,
    tasks: int,
    *,
    width: int,
    most_jobs: int,
    wanted_at_once: int | None = None,
    time_s: int | None = None,
) -> JobPlan:
    """Return the jobs for `tasks` that take `total_s` together, in jobs that run `width` at once."""
    work_s = total_s / width
    jobs = math.ceil(work_s / (BUNCH_S if time_s is None else min(BUNCH_S, time_s / _MARGIN)))
    if wanted_at_once is not None:
        jobs = max(jobs, min(math.ceil(wanted_at_once / width), math.ceil(work_s / SHORTEST_JOB_S)))
        jobs = min(jobs, max(1, wanted_at_once // width))
    jobs = max(1, min(jobs, most_jobs, math.ceil(tasks / width)))
    limit_s = time_s or 60 * math.ceil((_MARGIN * work_s / jobs + 2 * longest_s + _STARTING_S) / 60)
    return JobPlan(jobs=jobs, time_s=limit_s)


def shares(jobs: int, work_s: float) -> list[float]:
    """Return which part of the work each bunch has: rounds of one a job, each half of what is left, the last all."""
    left, found = 1.0, []
    for number in range(ROUNDS):
        part = left / 2 if number < ROUNDS - 1 and left / 2 * work_s / jobs > SHORTEST_BUNCH_S else left
        found += [part / jobs] * jobs
        left -= part
        if left <= 0:
            break
    return found


def pack(times_s: Mapping[int, float], parts: Sequence[float]) -> list[list[int]]:
    """Return the tasks in bunches that have these parts of the work, the longest tasks first; none is empty."""
    order = sorted(times_s, key=lambda task: (-times_s[task], task))
    total_s = sum(times_s.values())
    packed: list[list[int]] = [[] for _ in parts]
    ends_s = [total_s * end for end in itertools.accumulate(parts)]
    number, done_s = 0, 0.0
    for task in order:
        # By its middle: a task goes where most of it lies.
        while number < len(parts) - 1 and done_s + times_s[task] / 2 > ends_s[number]:
            number += 1
        packed[number].append(task)
        done_s += times_s[task]
    return [bunch for bunch in packed if bunch]


def reordered(tasks: Sequence[int], rounds: int, number: int) -> list[list[int]]:
    """Return the tasks in bunches for round `number` of `rounds` in which jobs did nothing but die.

    One of the tasks may end every job that comes to it before the others have run: each round begins with another part
    of them, and bunches are small, so that others are done before.
    """
    first = number * len(tasks) // rounds or min(number, len(tasks) - 1)
    order = [*tasks[first:], *tasks[:first]]
    size = math.ceil(len(order) / MOST_SMALL_BUNCHES)
    return [order[start : start + size] for start in range(0, len(order), size)]


def refuse_many_jobs(items: int, tasks_per_job: int, *, most_jobs: int) -> None:
    """Raise ConfigError if so few tasks a job make more jobs than the site takes."""
    if tasks_per_job < 1:
        raise ConfigError(f"tasks_per_job={tasks_per_job}: give at least 1, or leave it out.")
    jobs = math.ceil(items / tasks_per_job)
    if jobs > most_jobs:
        raise ConfigError(
            f"{items:,} items with --tasks-per-job {tasks_per_job} would be {jobs:,} jobs: this site takes "
            f"{most_jobs:,} from one command, and starting them alone would keep the scheduler busy for "
            f"{format_seconds(jobs * JOB_START_S)}. Leave it out: shoal then measures a few tasks and packs the rest "
            f"into at most {most_jobs:,} jobs of several minutes; or give at least "
            f"--tasks-per-job {math.ceil(items / most_jobs)}."
        )


def _shown(room: Room) -> str:
    parts = [f"{room.cores} core{'s' * (room.cores != 1)}"]
    parts += [f"{room.memory_bytes / 1e9:.3g} GB of memory"] * (room.memory_bytes > 0)
    on = f" on {room.gpus} GPUs" if room.gpus > 1 else ""
    parts += [f"{room.gpu_memory_bytes / 1e9:.3g} GB of GPU memory{on}"] * (room.gpu_memory_bytes > 0)
    return ", ".join(parts)

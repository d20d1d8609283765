"""The side of a map that runs in a job: takes bunches from the folder until there are none, or its time is nearly over.

1. It gives back what an earlier start of the same job had taken: Slurm has put that job into the queue again.
2. It takes a bunch, runs its tasks by a pool of warm workers, and takes the next when nearly all tasks have been sent.
3. On Slurm's notice, and when what is left of the time is too short for the longest task so far, it sends no more
   tasks, waits for those under way, and gives the bunch back: what is left runs in another job.
4. While the side that submits is still planning, it waits for more, a minute at most.
"""

import argparse
import functools
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.core.looks import Looks
from shoal.core.notice import read_wall_end
from shoal.launch.parent import die_with_parent
from shoal.tasks.claims import Bunch, Holder, give_back, give_back_of, take
from shoal.tasks.executor import Executor, Started
from shoal.tasks.folder import TaskFolder
from shoal.tasks.journal import done_tasks
from shoal.tasks.kept import KeptTask, note_deaths
from shoal.tasks.outcome import Failure

PLANNING = "planning.json"
"""Lies in the folder's jobs/ while more bunches are to come."""
LINGER_S = 60.0
_MARGIN_S = 5.0
_LOOK_S, _LATEST_LOOK_S = 0.02, 2.0
_OURS_S = 1.0


@dataclass
class Held:
    """A bunch that is being run."""

    bunch: Bunch
    started: Started
    checked_s: float


class Node:
    """One job of a map."""

    def __init__(
        self, folder: TaskFolder, *, width: int, retries: int, reads_at_once: int | str | None, code: str = ""
    ) -> None:
        self._folder, self._width = folder, width
        self._holder = this_holder()
        self._pool = Executor(width, retries=retries, say=lambda line: print(line, flush=True))
        self._builder = functools.partial(KeptTask, str(folder.path), self._holder.job, reads_at_once, code)
        self._held: list[Held] = []
        self._looks = Looks(_LOOK_S, _LATEST_LOOK_S)
        self._end_s = read_wall_end()
        self._longest_s = 0.0
        self._is_told = False

    def stop(self, *_: object) -> None:
        """Take no more tasks. Slurm's notice calls it."""
        self._is_told = True

    def run(self) -> None:
        """Run tasks until there are none, or no time."""
        holder = self._holder
        give_back_of(self._folder, lambda other: other.job == holder.job and other.start < holder.start)
        idle_s = time.monotonic()
        while not self._is_time():
            is_over = False
            if self._has_room() and self._looks.is_due():
                may_come = self._may_come()  # asked first: what is put out meanwhile is taken
                is_over = not self._take() and not may_come
            self._see_to_ended()
            if self._held:
                self._held[0].started.wait(self._held[0].started.done, seconds=_LOOK_S)
                idle_s = time.monotonic()
            elif is_over or time.monotonic() - idle_s > LINGER_S:
                break
            else:
                time.sleep(self._looks.left_s())
        self._leave()

    def _has_room(self) -> bool:
        """Return whether nearly all tasks have been sent to workers."""
        return sum(held.started.batch.left() for held in self._held) <= self._width

    def _take(self) -> bool:
        """Return whether there was a bunch; the next is looked for at once then, and else after a while."""
        bunch = take(self._folder, self._holder)
        if bunch is not None:
            self._looks.begin_anew()
            started = self._pool.start(
                self._builder, bunch.tasks, is_builder=True, done_items=lambda: done_tasks(self._folder.done)
            )
            self._held.append(Held(bunch, started, time.monotonic()))
        return bunch is not None

    def _see_to_ended(self) -> None:
        for held in list(self._held):
            if held.started.done == len(held.bunch.tasks):
                note_deaths(self._folder, self._failures(held), self._holder.job)
                held.bunch.finish()
                self._held.remove(held)
                self._looks.begin_anew()  # workers are idle
            elif time.monotonic() - held.checked_s > _OURS_S:
                held.checked_s = time.monotonic()
                if not held.bunch.is_ours():
                    held.started.batch.cancel()
                    self._held.remove(held)

    def _failures(self, held: Held) -> dict[int, Failure]:
        return {held.bunch.tasks[at]: failure for at, failure in held.started.failures.items()}

    def _is_time(self) -> bool:
        if self._is_told:
            return True
        self._longest_s = max([self._longest_s, *(held.started.batch.longest_s for held in self._held)])
        return self._end_s is not None and time.time() + 1.5 * self._longest_s + _MARGIN_S > self._end_s

    def _may_come(self) -> bool:
        return (self._folder.jobs / PLANNING).exists()

    def _leave(self) -> None:
        """Send nothing more, wait for what is under way, and give back what is left."""
        for held in self._held:
            held.started.batch.cancel()
        for held in self._held:
            left_s = None if self._end_s is None else max(0.0, self._end_s - time.time())
            held.started.batch.ended.wait(left_s)
            note_deaths(self._folder, self._failures(held), self._holder.job)
            if held.started.done == len(held.bunch.tasks):
                held.bunch.finish()
            else:
                give_back(self._folder, held.bunch.path)
        self._pool.kill()


def this_holder() -> Holder:
    """Return under which name this process takes bunches."""
    array, element = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    job = f"{array}_{element}" if array and element else os.environ.get("SLURM_JOB_ID", "none")
    host = socket.gethostname().split(".")[0]
    return Holder(job, int(os.environ.get("SLURM_RESTART_COUNT", "0")), f"{host}-{os.getpid()}")


def main(argv: Sequence[str] | None = None) -> None:
    """Be a job of a map."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--at-once", type=int, required=True)
    parser.add_argument("--retries", type=int, required=True)
    parser.add_argument("--reads-at-once", default="")
    parser.add_argument("--code", default="")
    asked = parser.parse_args(argv)
    reads = int(asked.reads_at_once) if asked.reads_at_once.isdigit() else asked.reads_at_once or None
    die_with_parent(os.getppid())
    folder = TaskFolder.existing(asked.folder)
    node = Node(folder, width=asked.at_once, retries=asked.retries, reads_at_once=reads, code=asked.code)
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, node.stop)
    node.run()


if __name__ == "__main__":
    main()

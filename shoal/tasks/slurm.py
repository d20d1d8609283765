"""The tasks of a folder in a few Slurm jobs; the folder is all that the two sides share.

1. A first job runs a few tasks, spread over the items, and then waits for more: their times say how long all take.
2. The rest is packed into bunches (bunch.py), which the first job and as many more as planned take from the folder
   (claims.py, node.py). Jobs are elements of arrays, each within the site's limit.
3. This side reads the journals as they grow, and asks Slurm now and then. The bunches of a job that has ended are put
   out again. When no job lives and tasks are left, a next round is planned for those alone, by the times known by then.
4. If this side is killed, the jobs go on. Started again, it reads the journals, asks Slurm for the jobs that it finds
   in the folder, and goes on with 3. A controller that does not answer is asked again.
"""

import math
import pickle
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.errors import ConfigError, SlurmError, WorkerFailed
from shoal.core.files import write_whole
from shoal.core.units import format_seconds
from shoal.data.stage.locks import FileLock
from shoal.launch.slurm.commands import cancel, submit
from shoal.launch.slurm.sbatch import Submission
from shoal.launch.slurm.site import Site, read_site
from shoal.tasks import claims
from shoal.tasks.bunch import (
    JobPlan,
    Room,
    at_once,
    pack,
    plan_jobs,
    predict,
    refuse_many_jobs,
    reordered,
    shares,
    spread,
)
from shoal.tasks.folder import TaskFolder
from shoal.tasks.journal import Journals
from shoal.tasks.node import PLANNING
from shoal.tasks.progress import Progress
from shoal.tasks.queued import JobWatch, read_sample, smallest_node, write_sample

FIRST_JOB_S = 900
"""The time of the first job, while nobody knows what tasks take; four times as much where that was too short."""
NOTICE_S = 20
FEWEST_MEASURED = 4
VAIN_ROUNDS = 3
_UNASKED_WIDTH = 8
_WIDE_S = 60.0
_POLL_S, _RARELY_S = 0.1, 10.0
_AGAIN_S = 5.0
_DOWN_S = 600.0


@dataclass(frozen=True)
class SlurmOptions:
    """What a job may have: `task` is what one task needs, `time_s` the time limit of a job, where one is asked for."""

    time_s: int | None = None
    partition: str | None = None
    account: str | None = None
    task: Room = field(default_factory=Room)
    gpus_per_job: int = 0
    node_gpu_memory_bytes: float = 0
    tasks_per_job: int | None = None
    task_time_s: float | None = None
    """What a task takes, where that is known: nothing is measured then."""
    sizes: Sequence[float] | None = None
    """Of each item, where tasks take time in proportion to that."""
    site: Path | None = None
    extra: tuple[str, ...] = ()


def check_options(options: SlurmOptions, items: int) -> None:
    """Raise ConfigError if these options make no sense for so many items: before anything is written."""
    if options.tasks_per_job is not None:
        refuse_many_jobs(items, options.tasks_per_job, most_jobs=read_site(options.site).job_limit)
    if options.sizes is not None and len(options.sizes) != items:
        raise ConfigError(f"{len(options.sizes):,} sizes for {items:,} items: give one an item.")


def map_on_slurm(
    folder: TaskFolder,
    options: SlurmOptions,
    *,
    workers: int | None,
    retries: int,
    reads_at_once: int | str | None,
    progress: Progress,
) -> None:
    """Run the tasks of `folder` that have no result yet, and return when each has one or has failed for good."""
    site = read_site(options.site)
    with FileLock(folder.path / "submit.lock") as lock:
        if not lock.take():
            raise ConfigError(f"another process is at work on {folder.path}. Wait for it, or give another folder.")
        asked = ["--retries", str(retries), "--reads-at-once", str(reads_at_once or "")]
        SlurmMap(folder, options, site, asked, workers=workers, retries=retries, progress=progress).run()


class SlurmMap:
    """The side of a map that submits."""

    def __init__(
        self,
        folder: TaskFolder,
        options: SlurmOptions,
        site: Site,
        asked: list[str],
        *,
        workers: int | None,
        retries: int,
        progress: Progress,
    ) -> None:
        self._folder, self._options, self._site, self._asked = folder, options, site, asked
        self._wanted, self._retries, self._progress = workers, retries, progress
        self._count = folder.count()
        self._journals = Journals(folder.done)
        self._done: dict[int, float] = {}
        self._tries: dict[int, int] = {}
        self._failed: set[int] = set()
        self._sample = read_sample(folder)
        self._watch = JobWatch(folder)
        self._node: Room | None = None
        self._vain, self._done_before = 0, -1

    def run(self) -> None:
        """Submit and watch, until every task has a result or has failed for good."""
        self._read()
        self._tries.clear()
        self._failed.clear()  # what failed before is tried again
        try:
            while len(self._done) + len(self._failed) < self._count:
                begun_s = time.monotonic()
                self._read()
                read_s = time.monotonic() - begun_s
                if self._sample and all(task in self._done or task in self._failed for task in self._sample):
                    self._go_on()
                self._ask()
                self._progress.update(len(self._done), failed=len(self._failed), more=self._watch.said())
                time.sleep(max(_POLL_S, min(_RARELY_S, 10 * read_s)))  # a tenth of the time at most goes to reading
        except KeyboardInterrupt:
            self._progress.say(f"The jobs go on ({', '.join(self._watch.jobs)}); the same command shows how they fare.")
            raise
        self._clear_up()

    def _read(self) -> None:
        for record in self._journals.news():
            if not record.has_failed:
                self._done.setdefault(record.index, record.seconds)
                self._failed.discard(record.index)
            elif record.index not in self._done:
                self._tries[record.index] = self._tries.get(record.index, 0) + 1
                is_death = pickle.loads(record.data).is_death  # noqa: S301  # from our own folder
                if is_death or self._tries[record.index] > self._retries:
                    self._failed.add(record.index)

    def _ask(self) -> None:
        """Act on what Slurm says about the jobs, if it has said something new."""
        answer = self._watch.look()
        if answer is None:
            return
        claims.give_back_of(self._folder, lambda holder: answer.is_over(holder.job))
        if not answer.live:
            self._read()
            self._next_round()

    def _next_round(self) -> None:
        """Begin anew with what is left: no job lives."""
        left = self._left()
        if not left:
            return
        self._vain = self._vain + 1 if len(self._done) == self._done_before else 0
        self._done_before = len(self._done)
        if self._vain >= VAIN_ROUNDS:
            raise WorkerFailed(
                f"{VAIN_ROUNDS} times, jobs ended without one more result; {len(left):,} tasks are left, the first is "
                f"task {left[0]}. {self._watch.ends()} If tasks take longer than a job, give more --time.",
                details=self._watch.last_output(),
            )
        claims.wipe(self._folder)
        if self._options.task_time_s is None and self._options.tasks_per_job is None and not self._done:
            self._measure(left)
        else:
            self._submit_for(left, already=0)

    def _measure(self, left: Sequence[int]) -> None:
        width = min(self._width(), self._wanted or _UNASKED_WIDTH, len(left))
        chosen = [left[at] for at in spread(len(left), max(FEWEST_MEASURED, 2 * width))]
        self._sample = chosen
        write_sample(self._folder, chosen)
        claims.offer(self._folder, 0, chosen)
        time_s = self._options.time_s or FIRST_JOB_S * 4**self._vain
        self._progress.say(f"Measuring {len(chosen)} of {len(left):,} tasks.")
        self._submit(JobPlan(jobs=1, time_s=time_s), width)

    def _go_on(self) -> None:
        """Plan the rest by what the first tasks took; the job that measured them waits for it."""
        if self._done:
            covered = claims.covered(self._folder)
            self._submit_for([task for task in self._left() if task not in covered], already=1)
        self._sample = []
        (self._folder.jobs / PLANNING).unlink(missing_ok=True)

    def _submit_for(self, left: Sequence[int], *, already: int) -> None:
        """Put out the bunches of `left`, and submit the jobs for them, less those that are there already."""
        if not left:
            return
        times_s, options = self._times(left), self._options
        total_s = sum(times_s.values())
        wide = self._wanted or max(1, math.ceil(total_s / _WIDE_S))
        width = min(self._width(), wide, len(left), options.tasks_per_job or len(left))
        plan = plan_jobs(
            total_s,
            max(times_s.values()),
            len(left),
            width=width,
            most_jobs=self._site.job_limit,
            wanted_at_once=self._wanted,
            time_s=options.time_s,
        )
        parts = shares(plan.jobs, total_s / width)
        if options.tasks_per_job is not None:
            jobs = math.ceil(len(left) / options.tasks_per_job)
            plan, parts = JobPlan(jobs, options.time_s or 3600), [1 / jobs] * jobs
        bunches = reordered(left, VAIN_ROUNDS, self._vain) if self._vain else pack(times_s, parts)
        for number, tasks in enumerate(bunches, claims.next_number(self._folder)):
            claims.offer(self._folder, number, tasks)
        (self._folder.jobs / PLANNING).unlink(missing_ok=True)
        self._progress.say(
            f"{len(left):,} tasks of about {format_seconds(total_s / len(left))}: {plan.jobs:,} "
            f"job{'s' * (plan.jobs != 1)} of {width} at once, about {format_seconds(total_s / width / plan.jobs)} each."
        )
        if plan.jobs > already:
            self._submit(JobPlan(plan.jobs - already, plan.time_s), width)

    def _submit(self, plan: JobPlan, width: int) -> None:
        """Submit arrays of jobs; wait for a controller that is down, unless it never was up."""
        options, folder = self._options, self._folder
        command = (sys.executable, "-m", "shoal.tasks.node", str(folder.path), "--at-once", str(width), *self._asked)
        left = plan.jobs
        while left > 0:
            number = min(left, self._site.array_limit)
            submission = Submission(
                name=f"map-{re.sub(r'[^A-Za-z0-9_.-]', '_', folder.path.name)}",
                command=command,
                folder=self._watch.next_folder(),
                time_s=plan.time_s,
                cpus_per_task=width * options.task.cores,
                memory_bytes_per_node=int(width * options.task.memory_bytes) or None,
                gpus_per_node=options.gpus_per_job,
                partition=options.partition,
                account=options.account,
                array=number,
                notice_s=NOTICE_S,
                extra=options.extra,
            )
            self._watch.add(self._patiently(submission))
            left -= number

    def _patiently(self, submission: Submission) -> str:
        end_s = time.monotonic() + _DOWN_S
        while True:
            try:
                return submit(submission, self._site)
            except SlurmError as error:
                if not self._watch.jobs or time.monotonic() > end_s:
                    raise
                self._progress.say(f"{error} Trying again.")
                time.sleep(_AGAIN_S)

    def _width(self) -> int:
        """Return how many tasks a node runs at once."""
        if self._node is None:
            self._node = smallest_node(
                self._options.partition, self._options.task.cores, self._options.node_gpu_memory_bytes
            )
        return at_once(self._node, self._options.task)

    def _times(self, left: Sequence[int]) -> dict[int, float]:
        if self._options.task_time_s is not None or not self._done:
            return dict.fromkeys(left, self._options.task_time_s or 1.0)
        return predict(self._done, left, self._options.sizes)

    def _left(self) -> list[int]:
        return [task for task in range(self._count) if task not in self._done and task not in self._failed]

    def _clear_up(self) -> None:
        claims.wipe(self._folder)
        (self._folder.jobs / PLANNING).unlink(missing_ok=True)
        try:
            cancel(self._watch.jobs)
        except SlurmError as error:
            self._progress.say(f"All is done, but jobs may still wait in the queue: {error}")
        write_whole(self._folder.jobs / "ended", "")

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
import time
from collections.abc import Callable, Sequence
from typing import Any

from shoal.core.errors import SlurmError, WorkerFailed
from shoal.core.units import format_seconds
from shoal.launch.slurm.commands import cancel
from shoal.launch.slurm.site import Site, read_site
from shoal.tasks import claims
from shoal.tasks.alone import alone
from shoal.tasks.bunch import JobPlan, pack, plan_jobs, predict, reordered, shares, spread
from shoal.tasks.code import keep_code
from shoal.tasks.folder import TaskFolder
from shoal.tasks.journal import Journals, Record
from shoal.tasks.node import PLANNING
from shoal.tasks.progress import Progress
from shoal.tasks.queued import JobWatch, read_sample, write_sample
from shoal.tasks.submitting import SlurmOptions, Submitter

FIRST_JOB_S = 900
"""The time of the first job, while nobody knows what tasks take; four times as much where that was too short."""
FEWEST_MEASURED = 4
VAIN_ROUNDS = 3
_UNASKED_WIDTH = 8
_WIDE_S = 60.0
_POLL_S, _RARELY_S = 0.1, 10.0


Settle = Callable[[Record], None]
"""Takes the record of each task that has a result now, or has failed for good."""


def map_on_slurm(
    folder: TaskFolder,
    options: SlurmOptions,
    *,
    function: Callable[..., Any],
    workers: int | None,
    retries: int,
    reads_at_once: int | str | None,
    progress: Progress,
    settle: Settle = lambda _: None,
    is_stopped: Callable[[], bool] = lambda: False,
) -> None:
    """Run the tasks of `folder` that have no result yet, and return when each has one or has failed for good.

    Where `is_stopped`, the jobs are ended, and WorkerFailed is raised.
    """
    site = read_site(options.site)
    with alone(folder):
        code, copied = keep_code(folder, function, file=options.code)
        if copied is not None and copied.note:
            progress.say(copied.note)
        asked = ["--retries", str(retries), "--reads-at-once", str(reads_at_once or ""), "--code", str(code)]
        running = SlurmMap(folder, options, site, asked, workers=workers, retries=retries, progress=progress)
        running.run(settle, is_stopped)


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
        self._folder, self._options, self._site = folder, options, site
        self._wanted, self._retries, self._progress = workers, retries, progress
        self._count = folder.count()
        self._journals = Journals(folder.done)
        self._done: dict[int, float] = {}
        self._tries: dict[int, int] = {}
        self._failed: set[int] = set()
        self._sample = read_sample(folder)
        self._watch = JobWatch(folder)
        self._submitter = Submitter(folder, options, site, asked, watch=self._watch, say=progress.say)
        self._settle: Settle = lambda _: None
        self._vain, self._done_before = 0, -1

    def run(self, settle: Settle, is_stopped: Callable[[], bool]) -> None:
        """Submit and watch, until every task has a result or has failed for good."""
        self._read()
        self._settle = settle
        self._tries.clear()
        self._failed.clear()  # what failed before is tried again
        try:
            while len(self._done) + len(self._failed) < self._count:
                begun_s = time.monotonic()
                if is_stopped():
                    self._clear_up()
                    raise WorkerFailed("the jobs were ended before this task was done.")
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
            if not record.has_failed and record.index not in self._done:
                self._done[record.index] = record.seconds
                self._failed.discard(record.index)
                self._settle(record)
            elif record.has_failed and record.index not in self._done:
                self._tries[record.index] = self._tries.get(record.index, 0) + 1
                is_death = pickle.loads(record.data).is_death  # noqa: S301  # from our own folder
                if is_death or self._tries[record.index] > self._retries:
                    self._failed.add(record.index)
                    self._settle(record)

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
        width = min(self._submitter.width(), self._wanted or _UNASKED_WIDTH, len(left))
        chosen = [left[at] for at in spread(len(left), max(FEWEST_MEASURED, 2 * width))]
        self._sample = chosen
        write_sample(self._folder, chosen)
        claims.offer(self._folder, 0, chosen)
        time_s = self._options.time_s or FIRST_JOB_S * 4**self._vain
        self._progress.say(f"Measuring {len(chosen)} of {len(left):,} tasks.")
        self._submitter.submit(JobPlan(jobs=1, time_s=time_s), width)

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
        width = min(self._submitter.width(), wide, len(left), options.tasks_per_job or len(left))
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
            self._submitter.submit(JobPlan(plan.jobs - already, plan.time_s), width)

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
        self._watch.end()

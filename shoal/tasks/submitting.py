"""What is asked of Slurm for a map: the options of its jobs, and their submission in arrays within the limit."""

import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.core.errors import ConfigError, SlurmError
from shoal.launch.slurm.commands import submit
from shoal.launch.slurm.sbatch import Submission
from shoal.launch.slurm.site import Site, read_site
from shoal.tasks.bunch import JobPlan, Room, at_once, refuse_many_jobs
from shoal.tasks.folder import TaskFolder
from shoal.tasks.queued import JobWatch, smallest_node

NOTICE_S = 20
_AGAIN_S = 5.0
_DOWN_S = 600.0


@dataclass(frozen=True)
class SlurmOptions:
    """What a job may have: `task` is what one task needs, `time_s` the time limit of a job, where one is asked for."""

    time_s: int | None = None
    partition: str | None = None
    account: str | None = None
    task: Room = field(default_factory=Room)
    """The cores and the memory that one task needs."""
    gpus_per_job: int = 0
    node_gpu_memory_bytes: float = 0
    """Of all GPUs of a node together, where several tasks share one."""
    tasks_per_job: int | None = None
    """How many tasks a job is given; None: as many as make it run for minutes."""
    task_time_s: float | None = None
    """What a task takes, where that is known: nothing is measured then."""
    sizes: Sequence[float] | None = None
    """Of each item, where tasks take time in proportion to that."""
    site: Path | None = None
    """The site.toml; None: the one of this user, or none."""
    extra: tuple[str, ...] = ()
    """More options of sbatch, as they are written there."""
    code: Path | None = None
    """The file whose code is copied for the jobs; None: that of the function."""


def check_options(options: SlurmOptions, items: int) -> None:
    """Raise ConfigError if these options make no sense for so many items: before anything is written."""
    if options.tasks_per_job is not None:
        refuse_many_jobs(items, options.tasks_per_job, most_jobs=read_site(options.site).job_limit)
    if options.sizes is not None and len(options.sizes) != items:
        raise ConfigError(f"{len(options.sizes):,} sizes for {items:,} items: give one an item.")


class Submitter:
    """Submits the jobs of a map, which run `shoal.tasks.node` with the words `asked`."""

    def __init__(
        self,
        folder: TaskFolder,
        options: SlurmOptions,
        site: Site,
        asked: Sequence[str],
        *,
        watch: JobWatch,
        say: Callable[[str], None],
    ) -> None:
        self._folder, self._options, self._site, self._asked = folder, options, site, asked
        self._watch, self._say = watch, say
        self._node: Room | None = None

    def width(self) -> int:
        """Return how many tasks a node runs at once."""
        options = self._options
        if self._node is None:
            gpus = Room(options.task.cores, 0, options.node_gpu_memory_bytes, options.gpus_per_job)
            self._node = smallest_node(options.partition or self._site.partition, gpus)
        return at_once(self._node, options.task)

    def submit(self, plan: JobPlan, width: int) -> None:
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
                self._say(f"{error} Trying again.")
                time.sleep(_AGAIN_S)

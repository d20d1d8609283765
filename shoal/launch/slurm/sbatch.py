"""The text of a batch script: a pure function of what is to run and of the site.

1. The options of sbatch, one `#SBATCH` line each: the site's, then the submission's, then the user's own.
2. USR1, which Slurm sends `notice_s` before the end and when the job makes way for another, and TERM go to the command.
   It begins with USR1 ignored: a notice that comes while it is still being loaded must not end it.
3. The site's modules, its setup, and its place for temporary files. A module that cannot be loaded ends the job.
4. The command; by srun, as every task, where it is `per_task`.
5. Exit code 75 says that it stopped in order and can go on: the job is put into the queue again, under the same number,
   unless a file `cancelled` lies beside the script. A controller that does not answer is asked again, for an hour: if
   that is longer than the job may last, it is not there to end it either. One that refuses is asked three times.

The job is submitted from the folder, so that its output goes there, and the script itself goes to `directory`: no name
of a folder is part of an option. Still Slurm expands % and \\ in the whole path of the output; where there are such,
the script opens its output itself.
"""

import shlex
from dataclasses import dataclass
from pathlib import Path

from shoal.core.errors import ConfigError, Stopped
from shoal.launch.slurm.site import Site

SCRIPT, CANCELLED = "job.sh", "cancelled"
"""Files in the folder of a submission: what is submitted, and what says that it is not to go on."""
OUTPUT, OUTPUT_OF_ELEMENT = "output-%j.txt", "output-%A_%a.txt"
"""The name of the output; %j is the job's number, %A that of an array, and %a that of its element."""
_AS_VARIABLES = {"%j": "${SLURM_JOB_ID}", "%A": "${SLURM_ARRAY_JOB_ID}", "%a": "${SLURM_ARRAY_TASK_ID}"}
MIB = 2**20
_REQUEUE_TRIES, _REQUEUE_AGAIN_S, _REFUSALS = 720, 5, 3


@dataclass(frozen=True)
class Submission:
    """What is to run in one job, or in each element of an array of jobs."""

    name: str
    """Shown by squeue."""
    command: tuple[str, ...]
    """Run once, on the first node of the allocation, or by srun as every task if `per_task`."""
    folder: Path
    """Where script and output go."""
    time_s: int
    nodes: int = 1
    tasks_per_node: int = 1
    cpus_per_task: int = 1
    memory_bytes_per_node: int | None = None
    gpus_per_node: int = 0
    partition: str | None = None
    account: str | None = None
    array: int | None = None
    """The number of elements of an array of jobs: 0 ... array - 1."""
    array_at_once: int | None = None
    """How many of them may run at a time."""
    requeue: bool = True
    no_kill: bool = False
    """Whether the job goes on when it loses a node, but the first."""
    notice_s: int = 60
    """How long before the time limit the command gets USR1."""
    per_task: bool = False
    extra: tuple[str, ...] = ()
    """Further options as the user gave them, such as "--qos=high"."""
    dependency: str | None = None
    distribution: str | None = None
    """In which order nodes get tasks, as srun's and sbatch's --distribution have it."""
    switches: str | None = None
    """How many switches to wait for, and how long: --switches."""
    directory: Path | None = None
    """Where the command runs; None: in the folder. `commands.submit` takes the directory of the caller."""

    def __post_init__(self) -> None:
        for name in ("time_s", "nodes", "tasks_per_node", "cpus_per_task", "notice_s"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} of a Slurm job: it must be at least 1.")
        if not self.command:
            raise ConfigError("a Slurm job without a command has nothing to run.")
        if self.array is not None and self.array < 1:
            raise ConfigError(f"array={self.array}: an array of jobs has at least 1 element.")
        for option in (self.name, *self.extra):
            if "\n" in option or "\0" in option:
                raise ConfigError(f"{option!r} has more than one line: an option of a Slurm job is one line.")


def sbatch_text(submission: Submission, site: Site) -> str:
    """Return the batch script of `submission` at `site`."""
    lines = ["#!/bin/bash", *(f"#SBATCH {_quoted(option)}" for option in _options(submission, site))]
    return "\n".join([*lines, *_begin(submission), *_site_lines(site), *_run(submission), *_end(submission), ""])


def _options(submission: Submission, site: Site) -> list[str]:
    options = [
        f"--job-name={submission.name}",
        f"--output={'/dev/null' if _opens_output(submission) else _output(submission)}",
        "--open-mode=append",
        f"--time={slurm_time(submission.time_s)}",
        f"--nodes={submission.nodes}",
        f"--ntasks-per-node={submission.tasks_per_node}",
        f"--cpus-per-task={submission.cpus_per_task}",
        f"--signal=B:USR1@{submission.notice_s}",
        "--requeue" if submission.requeue else "--no-requeue",
        *(["--no-kill"] if submission.no_kill else []),
    ]
    given = {
        "--partition": submission.partition or site.partition,
        "--account": submission.account or site.account,
        "--mem": _mebibytes(submission.memory_bytes_per_node),
        "--array": _array(submission),
        "--dependency": submission.dependency,
        "--distribution": submission.distribution,
        "--switches": submission.switches,
    }
    options += [f"{name}={value}" for name, value in given.items() if value]
    if submission.gpus_per_node:
        options.append(site.gpu_flag.format(count=submission.gpus_per_node))
    return [*options, *site.options, *submission.extra]


def _output(submission: Submission) -> str:
    return OUTPUT if submission.array is None else OUTPUT_OF_ELEMENT


def _opens_output(submission: Submission) -> bool:
    return bool(set(str(submission.folder)) & set("%\\"))


def slurm_time(time_s: float) -> str:
    """Return seconds as Slurm writes them, whole minutes up: 90 -> "0-00:02:00"."""
    minutes = _minutes(time_s)
    return f"{minutes // 1440}-{minutes // 60 % 24:02d}:{minutes % 60:02d}:00"


def _minutes(time_s: float) -> int:
    return -(-int(time_s) // 60)


def _mebibytes(memory_bytes: int | None) -> str | None:
    return None if memory_bytes is None else f"{-(-memory_bytes // MIB)}M"


def _array(submission: Submission) -> str | None:
    if submission.array is None:
        return None
    at_once = f"%{submission.array_at_once}" if submission.array_at_once else ""
    return f"0-{submission.array - 1}{at_once}"


def _quoted(option: str) -> str:
    """Return an option as sbatch reads it from a `#SBATCH` line, where spaces, quotes, # and \\ mean something."""
    if not set(option) & set(" \t\"'\\#"):
        return option
    escaped = option.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _begin(submission: Submission) -> list[str]:
    directory = [] if submission.directory is None else [f"cd -- {shlex.quote(str(submission.directory))} || exit 1"]
    output = _output(submission)
    for letter, variable in _AS_VARIABLES.items():
        output = output.replace(letter, variable)
    return [
        "",
        "folder=$PWD",
        "trap '' USR1",
        *([f'exec >>"{output}" 2>&1'] if _opens_output(submission) else []),
        *directory,
        f"export SHOAL_NOTICE_S={submission.notice_s} "
        f"SHOAL_WALL_END=$(($(date +%s) + {60 * _minutes(submission.time_s)}))",
    ]


def _site_lines(site: Site) -> list[str]:
    lines = ["type module >/dev/null 2>&1 || . /etc/profile"] if site.modules else []
    # Not every `module` says by its exit code whether it has loaded one; those that do are believed.
    for module in site.modules:
        load = f"module load {shlex.quote(module)}"
        lines.append(f"{load} || {{ echo {shlex.quote(f'{load} failed')} >&2; exit 1; }}")
    lines += site.setup
    if site.tmpdir:
        lines.append(f'export TMPDIR="{site.tmpdir}"')
    return lines


def _run(submission: Submission) -> list[str]:
    command = shlex.join(submission.command)
    # srun does not take the cores of a task from the job (since Slurm 22.05).
    step = f"srun --kill-on-bad-exit=0 --cpus-per-task={submission.cpus_per_task} " if submission.per_task else ""
    return [
        "",
        f"{step}{command} &",
        "command=$!",
        "trap 'told=1; kill -USR1 \"$command\" 2>/dev/null' USR1 TERM",
        "while told=; do",
        '  wait "$command"; code=$?',
        '  { [ -n "$told" ] && [ "$code" -gt 128 ]; } || break  # a signal has only ended the waiting',
        "done",
    ]


def _end(submission: Submission) -> list[str]:
    if not submission.requeue:
        return ["exit $code"]
    job = "$SLURM_JOB_ID" if submission.array is None else "${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"
    return [
        f'[ "$code" -eq {Stopped("").exit_code} ] || exit $code',
        "refusals=0",
        f"for _ in {{1..{_REQUEUE_TRIES}}}; do",
        f'  [ ! -e "$folder/{CANCELLED}" ] || break',
        f'  if scontrol requeue "{job}"; then sleep 60; break; fi  # this start is ended meanwhile',
        "  scontrol ping >/dev/null 2>&1 && refusals=$((refusals + 1))  # it is there, and will not",
        f'  [ "$refusals" -lt {_REFUSALS} ] || break',
        f"  sleep {_REQUEUE_AGAIN_S}",
        "done",
        "exit $code",
    ]

"""Training in a job of Slurm, from the login node: make the run folder, submit, and show how it goes."""

import dataclasses
import shlex
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.cli.probe_slurm import build
from shoal.cli.slurm_flags import Request, with_checkpoints
from shoal.core.errors import ConfigError, SlurmError, Stopped, WorkerFailed
from shoal.core.run_folder import RunFolder
from shoal.core.toml import read_toml
from shoal.core.units import format_seconds
from shoal.launch.slurm import commands
from shoal.launch.slurm.code import copy_code
from shoal.launch.slurm.ending import judge
from shoal.launch.slurm.following import JOB_TOML, Following, OutputReader, Submitted, output_of, read_submitted
from shoal.launch.slurm.nodes import nodes_for
from shoal.launch.slurm.sbatch import Submission
from shoal.launch.slurm.topology import place, read_switches
from shoal.launch.starting import PYTHON
from shoal.spec.cluster import Cluster
from shoal.spec.plan import Plan
from shoal.spec.program import Program
from shoal.spec.record import JobRecord

if TYPE_CHECKING:
    from rich.console import Console

    from shoal.report.live.view import LiveView
    from shoal.training.host import Say

_TICK_S = 0.2


def submit_training(
    file: Path,
    plan: Plan,
    request: Request,
    *,
    steps: int | None,
    name: str | None,
    runs: Path,
    cluster: Path | None,
    trace: str = "",
    log: str | None = None,
    say: "Say",
) -> RunFolder:
    """Make the run folder of the job in `file`, submit a job that trains it, and return it."""
    if not commands.is_there():
        raise SlurmError("--slurm: there is no sbatch on this machine. Run this on a login node of the cluster.")
    _refuse_if_going(runs, name)
    from shoal.training.jobfile import load_any  # these import torch
    from shoal.training.prepare import Asked, prepare_run
    from shoal.training.program import prepare_program

    job = load_any(file).with_steps(steps)
    elsewhere = _allocation(cluster, request, say)
    asked = Asked(file=file, runs=runs, name=name, elsewhere=elsewhere, trace=trace, log=log)
    if isinstance(job, Program):
        folder = prepare_program(job, plan, asked)
    else:
        plan, said = with_checkpoints(plan, request.time_s)
        if said:
            say(said)
        folder = prepare_run(job, plan, asked, say=say)
    folder = RunFolder.open(folder.path.resolve())  # the job stands in another directory
    copied = copy_code(folder.code, file=file)
    if copied.note:
        say(copied.note)
    try:
        _submit(folder, plan, request, say=say)
    except SlurmError as error:
        if commands.is_unknown(folder.slurm):  # a job may be at work in it
            raise SlurmError(
                f"{error} {folder.path} stays. When Slurm answers, see whether there is a job: shoal attach "
                f"{_named(folder)}"
            ) from None
        if not plan.checkpoint.resume:  # a folder that we have just made, for nothing
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    return folder


def _allocation(cluster: Path | None, request: Request, say: "Say") -> Cluster:
    """Return what the run will have: so many nodes of the kind of which there are most, by the file or by Slurm.

    Nothing is measured: this is a login node, and the work is done elsewhere.
    """
    file = cluster or Path("cluster.toml")
    known = read_toml(Cluster, file) if file.is_file() else _described(request, say)
    kind = max(known.nodes, key=lambda node: node.count)
    return dataclasses.replace(known, nodes=(dataclasses.replace(kind, count=request.nodes),))


def _described(request: Request, say: "Say") -> Cluster:
    """Return the cluster as Slurm describes it, with the catalog's figures."""
    kinds = nodes_for(request.partition or request.site.partition)
    if not request.gpus_per_worker:
        kinds = [dataclasses.replace(kind, gpu="", gpus=0) for kind in kinds]
    try:
        cluster, remarks = build(kinds)
    except ConfigError as error:
        say(f"No prediction: {error} A file with it: shoal probe --slurm --device NAME")
        cluster, remarks = build([dataclasses.replace(kind, gpu="", gpus=0) for kind in kinds])
    for remark in remarks:
        say(remark)
    return cluster


def _refuse_if_going(runs: Path, name: str | None) -> None:
    """Refuse to go on with a run that a job is training already."""
    if name is None or not (runs / name / "slurm" / JOB_TOML).is_file():
        return
    folder = RunFolder(runs / name)
    try:
        submitted = read_submitted(folder)
    except ConfigError:  # it was not submitted after all
        return
    if not commands.states([submitted.job])[submitted.job].is_over:
        raise ConfigError(
            f"{folder.path} is being trained by job {submitted.job}. See it: shoal attach {_named(folder)}. "
            f"End it: shoal cancel {_named(folder)}"
        )


def _named(folder: RunFolder) -> str:
    """Return the run as it is written on a command line."""
    return shlex.quote(str(folder.path))


def _submit(folder: RunFolder, plan: Plan, request: Request, *, say: "Say") -> None:
    switches = read_switches() if request.nodes > 1 else ()
    placement = place(plan.mesh, nodes=request.nodes, per_node=request.per_node, switches=switches)
    if placement.warning:
        say(placement.warning)
    submission = Submission(
        name=folder.name,
        command=(*PYTHON, "conduct", str(folder.path)),
        folder=folder.slurm,
        time_s=request.time_s,
        nodes=request.nodes,
        tasks_per_node=request.per_node,
        cpus_per_task=request.cpus_per_worker,
        memory_bytes_per_node=request.memory_bytes,
        gpus_per_node=request.gpus_per_worker * request.per_node,
        partition=request.partition,
        account=request.account,
        notice_s=request.notice_s,
        extra=request.options,
        distribution=placement.distribution if request.nodes > 1 else None,
        switches=placement.switches,
        no_kill=plan.goes_on and request.nodes > 1,
    )
    submitted = Submitted(
        job="",
        nodes=request.nodes,
        workers_per_node=request.per_node,
        time_s=request.time_s,
        notice_s=request.notice_s,
    )
    folder.slurm.mkdir(exist_ok=True)
    submitted.write(folder)  # before: whoever is killed now leaves what is needed to find the job again
    job = commands.submit(submission, request.site)
    dataclasses.replace(submitted, job=job).write(folder)
    nodes = f"{request.nodes} node{'s' * (request.nodes > 1)}"
    workers = f"{request.per_node} worker{'s' * (request.per_node > 1)}"
    say(f"Submitted {folder.path} as job {job}: {nodes} with {workers} each, for {format_seconds(request.time_s)}.")


def follow_run(folder: RunFolder, console: "Console", *, is_new: bool) -> None:
    """Show how the run's job goes until it has ended; raise what it failed with.

    Ctrl-C leaves the job as it is. `is_new`: show its output from the beginning.
    """
    from rich.markup import escape

    submitted = read_submitted(folder)
    following = Following(submitted.job, lambda line: console.print(escape(line), highlight=False, soft_wrap=True))
    output = OutputReader(output_of(folder, submitted.job))
    if not is_new:
        output.skip()
    try:
        while _goes_on(folder, following):
            state = following.look()
            if state is not None and state.state == "RUNNING":
                _show_start(folder, following, output, console)
            else:
                time.sleep(_TICK_S)
    except KeyboardInterrupt:
        raise Stopped(
            f"job {submitted.job} goes on without this terminal. See it again: shoal attach {_named(folder)}. "
            f"End it, with a checkpoint: shoal cancel {_named(folder)}",
            exit_code=130,
        ) from None
    _raise_failure(folder, following, submitted.job)


def _goes_on(folder: RunFolder, following: Following) -> bool:
    """Return whether something may still happen: a run that was stopped goes on if its job does."""
    if folder.read_result()["status"] in ("done", "failed"):
        return False
    state = following.look()
    return state is None or not state.is_over


def _show_start(folder: RunFolder, following: Following, output: OutputReader, console: "Console") -> None:
    """Show one start of the job, until it ends or is requeued."""
    from shoal.report.live.view import LiveView

    record = read_toml(JobRecord, folder.job_toml)
    attempts = _attempts(folder)
    with LiveView(folder, steps=record.steps, unit=record.unit, console=console) as view:
        while _goes_on(folder, following) and _attempts(folder) == attempts:
            state = following.look()
            if state is not None and state.state == "PENDING":
                break
            view.poll()
            _show_output(output, view)
            time.sleep(_TICK_S)
        _show_output(output, view)


def _show_output(output: OutputReader, view: "LiveView") -> None:
    for line in output.poll():
        if line.strip(" 0123456789:"):  # srun puts its number before every line of a worker, also before empty ones
            view.print(line)


def _attempts(folder: RunFolder) -> int:
    """Return how many starts came before the one whose events are in the folder."""
    return len(list(folder.events.glob("attempt-*")))


def _raise_failure(folder: RunFolder, following: Following, job: str) -> None:
    result = folder.read_result()
    if result["status"] == "done":
        return
    if result["status"] == "stopped":
        raise Stopped(result["message"])
    if result["status"] == "failed":
        workers = read_toml(Plan, folder.plan_toml).workers
        error = judge(folder, workers=workers, code=1, has_begun=True).error
        if error is not None and str(error) == result["message"]:
            raise error
        raise WorkerFailed(f"{result['message']} Its output: {output_of(folder, job)}")
    state = following.look(at_once=True)
    said = "ended without a word" if state is None else f"ended as {state.state}"
    raise SlurmError(f"job {job} {said}, before the run did. Its output: {output_of(folder, job)}")


def show_result(folder: RunFolder, *, as_json: bool) -> None:
    """Print the summary of a run that is done."""
    from shoal.report.summary import summarize

    summary = summarize(folder)
    if as_json:
        import json

        print(json.dumps(summary.as_json(), allow_nan=False))
        return
    from rich.console import Console

    from shoal.report.table import render

    Console().print(render(summary), crop=False)

"""What a report cannot know, one sentence each: a report on half the facts says which half."""

from collections.abc import Iterator

from shoal.report.logs.log import WorkerLog


def missing_from_logs(logs: list[WorkerLog], status: str, *, is_program: bool = False) -> Iterator[str]:
    """Yield a sentence for each thing that the workers' logs lack. The steps of a program are worker 0's alone."""
    if status == "unfinished":
        yield "The run has not said how it ended: it still goes on, or it was cut off."
    absent = [log.rank for log in logs if not log.present and not log.unreadable]
    if absent:
        yield f"No log of {ranks_in_words(absent)}: times and memory there are not counted."
    idle = [log.rank for log in logs if log.present and not log.num_steps and not log.unreadable]
    if is_program:
        idle = [rank for rank in idle if rank == 0]
    if idle:
        yield f"No step in the log of {ranks_in_words(idle)}."
    last_step = max((log.last_step for log in logs if log.last_step is not None), default=None)
    gone = _gone(logs)
    for log in logs:
        yield from _missing_from_log(log, last_step, status, is_gone=log.rank in gone)


def _gone(logs: list[WorkerLog]) -> set[int]:
    """Return the workers that were lost, or ended as asked, and never came back: that is said of them already."""
    changes = [fault for log in logs for fault in log.faults if fault.kind in ("lost", "ended", "joined")]
    last = {rank: fault.kind for fault in sorted(changes, key=lambda fault: fault.time_s) for rank in fault.workers}
    return {rank for rank, kind in last.items() if kind != "joined"}


def ranks_in_words(ranks: list[int]) -> str:
    """Return 'worker 3', or 'workers 0-2, 5'."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"worker{'' if len(ranks) == 1 else 's'} {words}"


def _missing_from_log(log: WorkerLog, last_step: int | None, status: str, *, is_gone: bool) -> Iterator[str]:
    whose = f"The log of worker {log.rank}"
    if log.unreadable:
        yield f"{whose} cannot be read: {log.unreadable}."
        return
    if log.damaged_lines:
        yield f"{whose} has {_lines(log.damaged_lines)}, left out."
    if log.half_written:
        yield f"{whose} ends in a half-written line, left out."
    if log.last_step is None or last_step is None:
        return
    if log.lacking_steps:
        yield f"{whose} lacks {log.lacking_steps} of the steps up to {log.last_step}."
    # Workers of a run that did not end well, or not yet, may be a step apart.
    tolerated = 0 if status == "done" else 1
    if last_step - log.last_step > tolerated and not is_gone:
        yield f"{whose} was cut short: it ends at step {log.last_step}, the run went on to step {last_step}."
    if status == "done" and not log.ended:
        yield f"{whose} has no end, so its peak memory is unknown."


def _lines(count: int) -> str:
    return "1 damaged line" if count == 1 else f"{count} damaged lines"

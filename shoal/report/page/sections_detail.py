"""The sections about one thing each: memory, communication, predictions, faults, checkpoints, data."""

from collections import defaultdict
from datetime import UTC, datetime

from shoal.core.units import format_bytes, format_count, format_seconds
from shoal.report.calls import predicted_call_s
from shoal.report.compare import UNKNOWN, compare, in_words
from shoal.report.logs.facts import Call, Fault, Loading, MemoryOver
from shoal.report.page.figures_detail import MOST_LINES, communication_figure, loading_figure, memory_figure
from shoal.report.page.sections import Section, bullets, figure, folded, table
from shoal.report.summary import Summary
from shoal.report.verdict import counted, percent, rate_in_words

_CALLS_SHOWN = 12
_FAULTS_SHOWN = 50
_LOADERS_SHOWN = 8
_LINK_NAMES = {"shm": "shared memory", "host": "sockets of the host", "network": "network", "gpu": "between GPUs"}


def memory_section(summary: Summary) -> Section | None:
    """Return what workers held over a step, of the step in which the most was."""
    if not summary.memory:
        return None
    most = max(summary.memory, key=lambda over: max(over.bytes))
    shown = sorted((over for over in summary.memory if over.step == most.step), key=lambda over: -max(over.bytes))
    shown = sorted(shown[:MOST_LINES], key=lambda over: over.rank)
    predicted = summary.predicted.peak_bytes if summary.predicted else ()
    predicted_bytes = predicted[most.rank] if most.rank < len(predicted) else None
    body = figure("memory", f"Memory over step {most.step}", _memory_caption(most, predicted_bytes))
    figures = {"memory": memory_figure(shown, predicted_bytes)}
    return Section("memory", "Memory over a step", body, figures)


def _memory_caption(most: MemoryOver, predicted_bytes: int | None) -> str:
    peak = max(range(len(most.bytes)), key=lambda i: most.bytes[i])
    words = f"In step {most.step:,} worker {most.rank} held the most: {format_bytes(most.bytes[peak])}, "
    words += f"{format_seconds(most.at_s[peak])} into it" + (f" ({most.labels[peak]})" if most.labels[peak] else "")
    return words + (f"; {format_bytes(predicted_bytes)} were predicted." if predicted_bytes else ".")


def communication_section(summary: Summary) -> Section | None:
    """Return what was communicated: by link, collective and algorithm, and how long a call takes by its size."""
    calls = summary.calls
    if not calls:
        return None
    steps = summary.calls_steps
    total_s = sum(call.seconds for call in calls)
    sums: dict[tuple[str, str, str], list[Call]] = defaultdict(list)
    for call in calls:
        sums[call.link, call.op, call.algorithm].append(call)
    by_time = sorted(sums.items(), key=lambda item: -sum(call.seconds for call in item[1]))
    rows = [(*key, *_call_cells(found, steps)) for key, found in by_time]
    shown = [(_LINK_NAMES.get(link, link), op, algorithm, *rest) for link, op, algorithm, *rest in rows]
    head = ("link", "collective", "algorithm", "calls a step", "bytes a step", "time a step", "rate")
    said = "Of one worker, the mean; the time also counts what runs beside computing. The rate is bytes over time."
    sizes = [
        _size_row(call, predicted_call_s(summary, call))
        for call in sorted(calls[:_CALLS_SHOWN], key=lambda call: call.bytes)
    ]
    by_size = table(
        ("size", "link", "collective", "algorithm", "calls", "one: predicted", "measured", "rate"),
        sizes,
        label="Calls by their size",
    )
    link, op, algorithm = by_time[0][0]
    caption = (
        f"A worker spent {format_seconds(total_s / steps) if steps else UNKNOWN} of a step in collectives, most of "
    )
    caption += f"it in {op} ({algorithm}) over {_LINK_NAMES.get(link, link)}. Each point is one size of call."
    body = figure("communication", "Time of a call by its size", caption)
    body += table(head, shown, label="Communication by link and algorithm", caption=said, bold=5)
    body += folded("By size", by_size)
    return Section("communication", "Communication", body, {"communication": communication_figure(summary)})


def _size_row(call: Call, predicted_s: float | None) -> tuple[str, ...]:
    one_s = format_seconds(call.seconds / call.count) if call.count else UNKNOWN
    link = _LINK_NAMES.get(call.link, call.link)
    said = in_words(predicted_s, format_seconds)
    return format_bytes(call.bytes), link, call.op, call.algorithm, f"{call.count:,}", said, one_s, _rate([call])


def _call_cells(calls: list[Call], steps: int) -> tuple[str, str, str, str]:
    if not steps:
        return (UNKNOWN, UNKNOWN, UNKNOWN, _rate(calls))
    count, num_bytes = sum(call.count for call in calls), sum(call.count * call.bytes for call in calls)
    seconds = sum(call.seconds for call in calls)
    return f"{count / steps:.3g}", format_bytes(num_bytes / steps), format_seconds(seconds / steps), _rate(calls)


def _rate(calls: list[Call]) -> str:
    seconds = sum(call.seconds for call in calls)
    num_bytes = sum(call.count * call.bytes for call in calls)
    return f"{format_bytes(num_bytes / seconds)}/s" if seconds > 0 else UNKNOWN


def predicted_section(summary: Summary) -> Section:
    """Return predicted beside measured."""
    note = "Measured samples/s include data loading, predicted ones do not."
    note = note if summary.predicted else "The plan holds no prediction."
    rows = [tuple(row) for row in compare(summary)]
    body = table(("", "predicted", "measured", "ratio"), rows, label="Predicted and measured", caption=note, bold=2)
    return Section("predicted", "Predicted and measured", body)


def fault_section(summary: Summary) -> Section | None:
    """Return what went wrong and how it was mended."""
    if not summary.faults:
        return None
    rows = [_fault_row(fault) for fault in summary.faults[:_FAULTS_SHOWN]]
    hidden = len(summary.faults) - _FAULTS_SHOWN
    caption = "Recovery: from the fault to the next step that was done."
    caption += f" {hidden:,} later ones not shown." if hidden > 0 else ""
    lost = sum(fault.lost_steps or 0 for fault in summary.faults)
    recovery_s = sum(fault.recovery_s or 0.0 for fault in summary.faults)
    words = [f"{counted(len(summary.faults), 'event')}, {format_seconds(recovery_s)} of recovery, {lost:,} steps lost."]
    head = ("time (UTC)", "step", "what", "recovery", "of it", "steps lost")
    body = bullets(words, "remarks") + table(head, rows, label="Faults and recoveries", caption=caption)
    return Section("faults", "Faults and recoveries", body)


def _fault_row(fault: Fault) -> tuple[str, ...]:
    try:
        when = datetime.fromtimestamp(fault.time_s, UTC).strftime("%H:%M:%S")
    except (OverflowError, ValueError, OSError):
        when = UNKNOWN
    parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in fault.parts_s)
    step = UNKNOWN if fault.step is None else f"{fault.step:,}"
    lost = UNKNOWN if fault.lost_steps is None else f"{fault.lost_steps:,}"
    return when, step, fault.sentence, in_words(fault.recovery_s, format_seconds), parts or UNKNOWN, lost


def checkpoint_section(summary: Summary) -> Section | None:
    """Return what checkpoints cost."""
    written = [saved for saved in summary.saves if not saved.error]
    if not written:
        return None
    stall_s, write_s = (sum(getattr(one, name) for one in written) / len(written) for name in ("stall_s", "write_s"))
    longest = max(written, key=lambda saved: saved.stall_s)
    num_bytes = sum(saved.bytes for saved in written) / len(written)
    rate = f"{format_bytes(num_bytes / write_s)}/s" if write_s > 0 else UNKNOWN
    row = (f"{len(written):,}", format_bytes(num_bytes), format_seconds(stall_s), format_seconds(write_s), rate)
    head = ("checkpoints", "bytes of one", "held training up", "took to write", "rate")
    caption = f"Of the worker that waited longest; the longest stall was {format_seconds(longest.stall_s)}, "
    caption += f"at step {longest.step:,}."
    body = table(head, [row], label="Checkpoints", caption=caption)
    return Section("checkpoints", "Checkpoints", body)


def data_section(summary: Summary) -> Section | None:
    """Return how fast data came, from where, and how long it was waited for."""
    if not summary.loading:
        return None
    worst = sorted(summary.loading, key=lambda loading: -loading.wait_s)
    rows = [_loading_row(loading, summary) for loading in worst[:_LOADERS_SHOWN]]
    head = (
        "worker",
        "waited in a step",
        "batch by one thread",
        "threads",
        "ahead",
        "samples/s",
        "bytes/s",
        "can load",
        "reads from",
    )
    hidden = len(worst) - _LOADERS_SHOWN
    caption = (
        "Samples and bytes a second as training took them; what the loader's threads can load if never full stands "
    )
    caption += "beside." + (f" Of {counted(len(worst), 'worker')}, those that waited longest." if hidden > 0 else "")
    over = figure("loading", "Waiting for data over steps", _loading_caption(summary))
    body = over + table(head, rows, label="Data loading by worker", caption=caption, bold=1)
    return Section("data", "Data and storage", body, {"loading": loading_figure(summary)})


def _loading_caption(summary: Summary) -> str:
    steps, wait_s = (sum(getattr(one, name) for one in summary.loading) for name in ("steps", "wait_s"))
    mean_s = wait_s / steps if steps else 0.0
    total_s = sum(summary.split.values())
    part = f", {percent(mean_s / total_s)} of it" if total_s > 0 else ""
    return f"Training waited {format_seconds(mean_s)} for data in a step{part}, in the mean over workers and steps."


def _loading_row(loading: Loading, summary: Summary) -> tuple[str, ...]:
    total_s = summary.per_worker[loading.rank].total_s or 0.0
    seconds = total_s * loading.steps
    samples = loading.samples / seconds if seconds > 0 else None
    num_bytes = loading.bytes / seconds if seconds > 0 and loading.bytes else None
    can = loading.samples / loading.fill_s * max(1, loading.threads) if loading.fill_s > 0 else None
    return (
        f"{loading.rank}",
        format_seconds(loading.wait_s / loading.steps) if loading.steps else UNKNOWN,
        format_seconds(loading.batch_s) if loading.fill_s > 0 else UNKNOWN,
        f"{loading.threads}",
        counted(loading.depth, "batch").replace("batchs", "batches"),
        in_words(samples, rate_in_words),
        in_words(num_bytes, lambda rate: f"{format_bytes(rate)}/s"),
        in_words(can, lambda rate: f"{format_count(rate)} samples/s"),
        loading.storage or UNKNOWN,
    )

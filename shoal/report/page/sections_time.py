"""The sections about a run's course: what to change, the loss, the split, the timeline, the workers."""

import statistics
from collections.abc import Sequence

from shoal.core.units import format_bytes, format_seconds
from shoal.report.advice import Advice, flags_of
from shoal.report.compare import UNKNOWN, in_words
from shoal.report.logs.steady import Worker
from shoal.report.page.figures import loss_figure, split_figure
from shoal.report.page.figures_detail import pace_figure, relative_paces
from shoal.report.page.sections import Section, bar, bullets, chooser, figure, folded, table, text
from shoal.report.page.timeline_figure import height_px, timeline_caption, timeline_figure, timeline_rows
from shoal.report.split import PARTS
from shoal.report.summary import Summary
from shoal.report.timeline import Timeline
from shoal.report.verdict import counted, metric_in_words, percent

# With more workers than this, their table is folded up.
_WORKERS_UNFOLDED = 16
_EVALUATIONS_SHOWN = 10
_STRAGGLERS_SHOWN = 5
# A list of shares for many workers is longer.
_FLAGS_UNFOLDED = 120


def loss_caption(summary: Summary) -> str:
    """Return the loss curve in words."""
    known = [(s, loss) for s, loss in zip(summary.step_numbers, summary.losses, strict=True) if loss is not None]
    if not known:
        return "No step has a finite loss."
    (first, first_loss), (last, last_loss) = known[0], known[-1]
    low, low_loss = min(known, key=lambda item: item[1])
    bad = summary.steps - len(known)
    sentence = f"The loss was {first_loss:.4g} at step {first:,} and {last_loss:.4g} at step {last:,}; "
    sentence += f"the lowest was {low_loss:.4g}, at step {low:,}."
    return sentence + (f" It was not finite in {counted(bad, 'step')}." if bad else "")


def advice_section(advices: Sequence[Advice]) -> Section | None:
    """Return what to change next."""
    if not advices:
        return None
    items = "".join(f"<li>{_advice_words(advice)}</li>" for advice in advices)
    return Section("advice", "What to change next", f"<ol>{items}</ol>")


def _advice_words(advice: Advice) -> str:
    flags = flags_of(advice.change) if advice.change else ""
    code = f"<code>{text(flags)}</code>" if flags else ""
    if len(flags) > _FLAGS_UNFOLDED:
        code = f"<details><summary>The flags of shoal train</summary>{code}</details>"
    gain = f"{percent(advice.share)} of each step; predicted gain {advice.predicted_gain:.2f}x"
    gain += " at least" * advice.is_bound
    return f'{text(advice.sentence)}<div class="note">{gain} {code}</div>'


def missing_section(summary: Summary) -> Section | None:
    """Return what the report could not know."""
    return Section("missing", "What is missing", bullets(summary.missing)) if summary.missing else None


def loss_section(summary: Summary) -> Section:
    """Return the loss over steps."""
    body = figure("loss", "Loss over steps", loss_caption(summary))
    return Section("losses", "Loss", body, {"loss": loss_figure(summary)})


def split_section(summary: Summary) -> Section:
    """Return what a step is made of: a bar, and the parts over time."""
    fractions = summary.fractions
    above = bar(fractions, [percent(fraction) for _, fraction in fractions])
    body = figure("split", "The parts of each step over steps", split_caption(summary), above=above)
    return Section("time", "Where the time of a step goes", body, {"split": split_figure(summary)})


def split_caption(summary: Summary) -> str:
    """Return what the split is a split of."""
    steady = summary.steps - summary.warm_up_steps
    words = f"The mean of {counted(summary.workers, 'worker')}: the bar over {counted(steady, 'step')}, without "
    words += f"{summary.warm_up_steps} of warm-up, the plot step by step."
    if summary.workers > 1:
        words += " Waiting is for slower workers; communication is what the links cost on top."
    times = summary.step_times
    if times:
        words += f" The median step took {format_seconds(times.median_s)}, one in twenty more than "
        words += f"{format_seconds(times.p95_s)}, the longest (step {times.longest_step:,}) "
        words += f"{format_seconds(times.longest_s)}."
    return words


def timeline_section(timelines: Sequence[Timeline], summary: Summary) -> Section | None:
    """Return one step of all workers, moment by moment."""
    if not timelines:
        return None
    choices, figures = [], {}
    for i, timeline in enumerate(timelines):
        plot_id = f"timeline-{i}"
        kinds, rows = timeline_rows(timeline)
        as_table = table(("worker", *kinds), rows, label=f"Timeline of {timeline.title}")
        label = f"What each worker did in {timeline.title}"
        body = figure(plot_id, label, timeline_caption(timeline), height_px=height_px(timeline))
        title = timeline.title + (f" ({timeline.why})" if timeline.why else "")
        choices.append((title, body + folded("As a table", as_table)))
        figures[plot_id] = timeline_figure(timeline)
    body = chooser("timeline", "Show", choices)
    if summary.traces:
        files = sorted({(trace.step, trace.rank, trace.file) for trace in summary.traces})
        names = "".join(f"<li><code>{text(file)}</code></li>" for _, _, file in files[:200])
        body += (
            f"<details><summary>{counted(len(files), 'trace')} to open in Perfetto</summary><ul>{names}</ul></details>"
        )
    return Section("timeline", "One step of each worker", body, figures)


def straggler_section(summary: Summary) -> Section | None:
    """Return who held the others up, and when."""
    known = [worker for worker in summary.per_worker if worker.split]
    if len(known) < 2:
        return None
    worst = sorted(known, key=lambda worker: -worker.held_up_s)[:_STRAGGLERS_SHOWN]
    rows = [
        (
            f"{worker.rank}",
            format_seconds(worker.busy_s),
            percent(worker.led),
            format_seconds(worker.held_up_s),
            format_seconds((worker.split or {}).get("waiting", 0.0)),
        )
        for worker in worst
    ]
    head = ("worker", "busy in a step", "was the slowest in", "held up each step by", "waited for others")
    said = (
        "Those who held the others up most; held up: how much shorter a step would be if it were as fast as the next."
    )
    body = figure("pace", "How long each worker was busy, over steps", pace_caption(summary))
    return Section(
        "stragglers",
        "Stragglers",
        body + table(head, rows, label="Stragglers", caption=said, bold=3),
        {"pace": pace_figure(summary)},
    )


def pace_caption(summary: Summary) -> str:
    """Return the workers' paces in words."""
    slowest = max(summary.per_worker, key=lambda worker: worker.busy_s)
    median = statistics.median(worker.busy_s for worker in summary.per_worker if worker.parts)
    ratio = slowest.busy_s / median if median > 0 else 1.0
    peaks = [
        (value, step, rank)
        for rank, row in enumerate(relative_paces(summary))
        for value, step in zip(row, summary.pace_steps, strict=True)
        if value is not None
    ]
    worst = max(peaks, default=(1.0, 0, 0))
    words = (
        f"How long each worker was busy in a step, beside the median of all. Worker {slowest.rank} was the slowest: "
    )
    words += f"{ratio:.2f} of the median."
    if worst[0] > 1.1 * ratio:
        words += f" For a while, from step {worst[1]:,}, worker {worst[2]} took {worst[0]:.2f} of it."
    return words


def worker_section(summary: Summary) -> Section:
    """Return one row a worker: its share of the samples, the parts of its step, its peak memory."""
    shown = [name for name in PARTS if any(worker.split and worker.split[name] for worker in summary.per_worker)]
    names = ("worker", "samples", *shown, "peak memory")
    head = "".join(f'<th scope="col" role="columnheader">{name}</th>' for name in names)
    all_samples = sum(worker.samples or 0.0 for worker in summary.per_worker)
    rows = "".join(_worker_row(worker, all_samples, shown, names) for worker in summary.per_worker)
    # The roles say again what the tags say: on a phone the rows are laid out as blocks, which takes their meaning away.
    body = (
        '<table class="workers" role="table"><caption>Mean of the steady steps.</caption>'
        f'<thead role="rowgroup"><tr role="row">{head}</tr></thead><tbody role="rowgroup">{rows}</tbody></table>'
    )
    if summary.workers > _WORKERS_UNFOLDED:
        body = folded(f"All {summary.workers} workers", body)
    return Section("each-worker", "Each worker", body)


def _worker_row(worker: Worker, all_samples: float, shown: list[str], names: tuple[str, ...]) -> str:
    share = worker.samples / all_samples if worker.samples is not None and all_samples else None
    parts = [worker.split[name] if worker.split else None for name in shown]
    cells = [
        in_words(share, percent),
        *(in_words(seconds, format_seconds) for seconds in parts),
        in_words(worker.peak_bytes, format_bytes),
    ]
    labelled = zip(names[1:], cells, strict=True)
    data = "".join(f'<td role="cell" data-label="{label}">{cell}</td>' for label, cell in labelled)
    error = f'<p class="message">{text(worker.error)}</p>' if worker.error else ""
    return f'<tr role="row"><th scope="row" role="rowheader">{worker.rank}{error}</th>{data}</tr>'


def evaluation_section(summary: Summary) -> Section | None:
    """Return one row an evaluation, the last ones only where there are many."""
    if not summary.evals:
        return None
    names = list(dict.fromkeys(name for _, metrics in summary.evals for name in metrics))
    rows = [
        (f"{step:,}", *(metric_in_words(metrics[name]) if name in metrics else UNKNOWN for name in names))
        for step, metrics in summary.evals[-_EVALUATIONS_SHOWN:]
    ]
    hidden = len(summary.evals) - _EVALUATIONS_SHOWN
    caption = f"{counted(hidden, 'earlier one')} not shown." if hidden > 0 else ""
    return Section("evaluations", "Evaluations", table(("step", *names), rows, label="Evaluations", caption=caption))

"""The parts of a page as HTML. Whatever comes from a run is escaped here: `text` is the only way in."""

from collections.abc import Iterable, Iterator
from html import escape

from shoal.core.units import format_bytes, format_seconds
from shoal.report.compare import UNKNOWN, compare, in_words
from shoal.report.log import clean
from shoal.report.steady import Worker
from shoal.report.summary import Summary
from shoal.report.verdict import PART_NAMES, counted, metric_in_words, percent, step_fractions

# With more workers than this, their table is folded up.
_WORKERS_UNFOLDED = 16
_EVALUATIONS_SHOWN = 10


def text(value: object) -> str:
    """Return any value as text that is safe in HTML, in attributes too."""
    return escape(clean(value), quote=True)


def section(title: str, body: str, kind: str = "") -> str:
    """Return a titled section; `title` and `kind` are our own words, `body` is HTML."""
    name = kind or title.lower().replace(" ", "-").replace(",", "")
    return (
        f'<section class="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{title}</h2>\n{body}</section>'
    )


def bullets(sentences: Iterable[str], css_class: str = "") -> str:
    """Return a list of sentences, or nothing when there is none."""
    items = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences)
    return f'<ul class="{css_class}">{items}</ul>' if items else ""


def figure(plot_id: str, label: str, caption: str, above: str = "") -> str:
    """Return the place of a plot; `caption` says in words what the plot shows, for whoever cannot see it."""
    plot = f'<div class="plot" id="{plot_id}" role="img" aria-label="{text(label)}. {text(caption)}"></div>'
    return f"<figure>{above}{plot}<figcaption>{text(caption)}</figcaption></figure>"


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


def split_bar(summary: Summary) -> str:
    """Return the mean step of the slowest worker as one bar with a legend."""
    fractions = step_fractions(summary)
    cells = "".join(f'<span style="width:{100 * f:.2f}%;background:var(--{name})"></span>' for name, f in fractions)
    legend = "".join(
        f'<li><i style="background:var(--{name})"></i>{name} <b>{percent(fraction)}</b></li>'
        for name, fraction in fractions
    )
    return f'<div class="split" aria-hidden="true">{cells}</div><ul class="legend">{legend}</ul>'


def split_caption(summary: Summary) -> str:
    """Return what the split is a split of."""
    steady = summary.steps - summary.warm_up_steps
    whose = f" of worker {summary.slowest.rank}, the slowest," if summary.slowest and summary.workers > 1 else ""
    bar = (
        f"The bar is the mean step{whose} over {counted(steady, 'step')}, without {summary.warm_up_steps} of warm-up; "
    )
    return bar + f"the plot is the mean over {counted(summary.workers, 'worker')}, step by step."


def predicted_table(summary: Summary) -> str:
    """Return predicted beside measured."""
    rows = "".join(
        f'<tr><th scope="row">{row.name}</th><td>{row.predicted}</td>'
        f'<td class="measured">{row.measured}</td><td>{row.ratio}</td></tr>'
        for row in compare(summary)
    )
    note = "Measured samples/s include data loading, predicted ones do not."
    note = note if summary.predicted else "The plan holds no prediction."
    head = "".join(f'<th scope="col">{name}</th>' for name in ("", "predicted", "measured", "ratio"))
    return f"<table><caption>{note}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def worker_table(summary: Summary) -> str:
    """Return one row a worker: its share of the samples, the parts of its step, its peak memory."""
    names = ("worker", "samples", *PART_NAMES.values(), "peak memory")
    head = "".join(f'<th scope="col" role="columnheader">{name}</th>' for name in names)
    all_samples = sum(worker.samples or 0.0 for worker in summary.per_worker)
    rows = "".join(_worker_row(worker, all_samples, names) for worker in summary.per_worker)
    # The roles say again what the tags say: on a phone the rows are laid out as blocks, which takes their meaning away.
    table = (
        '<table class="workers" role="table"><caption>Mean of the steady steps; communication holds the wait for '
        f'slower workers.</caption><thead role="rowgroup"><tr role="row">{head}</tr></thead>'
        f'<tbody role="rowgroup">{rows}</tbody></table>'
    )
    if summary.workers <= _WORKERS_UNFOLDED:
        return table
    return f"<details><summary>All {summary.workers} workers</summary>{table}</details>"


def evaluation_table(summary: Summary) -> str:
    """Return one row an evaluation, the last ones only where there are many."""
    names = list(dict.fromkeys(name for _, metrics in summary.evals for name in metrics))
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in ("step", *names))
    rows = "".join(
        f'<tr><th scope="row">{step:,}</th>'
        + "".join(f"<td>{metric_in_words(metrics[name]) if name in metrics else UNKNOWN}</td>" for name in names)
        + "</tr>"
        for step, metrics in summary.evals[-_EVALUATIONS_SHOWN:]
    )
    hidden = len(summary.evals) - _EVALUATIONS_SHOWN
    caption = f"<caption>{counted(hidden, 'earlier one')} not shown.</caption>" if hidden > 0 else ""
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and their values, a value of HTML each."""
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs) + "</dl>"


def circumstances(summary: Summary) -> Iterator[tuple[str, str]]:
    """Yield what the run was made of: the job, the plan, the machines, the software."""
    job, plan, record = summary.job, summary.plan, summary.record
    if record:
        yield "command", f"<code>{text(record.command)}</code>"
        yield "started", f"{text(record.started)} on {text(record.host)}"
    if summary.wall_s is not None:
        yield "wall time", format_seconds(summary.wall_s)
    if job:
        yield "job", f"<code>{text(job.file)}</code>, seed {job.seed}"
        yield "data", f"{counted(job.num_samples, 'sample')}, {job.batch_size:,} in a global batch"
    for sentence in summary.staging:
        yield "pack", text(sentence)
    if plan:
        yield "shares", ", ".join(percent(share) for share in plan.shares[:_WORKERS_UNFOLDED])
        yield "micro-batch", "the whole part at once" if plan.batch.micro_batch is None else f"{plan.batch.micro_batch}"
        yield "precision", text(plan.precision)
    for node in summary.cluster.nodes[:_WORKERS_UNFOLDED] if summary.cluster else ():
        devices = f"{node.devices} x {text(node.device)}" if node.devices else text(node.device)
        yield "node", f"{text(node.host)}: {devices}, {node.cores} cores, {format_bytes(node.memory_bytes)} memory"
    if record:
        yield "versions", text(", ".join(f"{name} {version}" for name, version in record.versions.items()))


def _worker_row(worker: Worker, all_samples: float, names: tuple[str, ...]) -> str:
    share = worker.samples / all_samples if worker.samples is not None and all_samples else None
    parts = [worker.parts[name] if worker.parts else None for name in PART_NAMES]
    cells = [
        in_words(share, percent),
        *(in_words(seconds, format_seconds) for seconds in parts),
        in_words(worker.peak_bytes, format_bytes),
    ]
    labelled = zip(names[1:], cells, strict=True)
    data = "".join(f'<td role="cell" data-label="{label}">{cell}</td>' for label, cell in labelled)
    error = f'<p class="message">{text(worker.error)}</p>' if worker.error else ""
    return f'<tr role="row"><th scope="row" role="rowheader">{worker.rank}{error}</th>{data}</tr>'

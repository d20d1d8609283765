"""The summary of a run for a terminal, at most 90 columns wide and readable without colour."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.core.units import format_seconds
from shoal.report.advice import advise, flags_of
from shoal.report.compare import Comparison, compare
from shoal.report.logs.log import clean
from shoal.report.split import PARTS
from shoal.report.summary import Summary
from shoal.report.verdict import headline, metric_in_words, percent, remarks

_WIDTH = 90
_LABEL_WIDTH = 11
_BAR_CELLS = 60

# As in the live view. Each part has its own sign, so that the bar reads without colour; letters where the terminal
# knows only ASCII.
_COLOURS = dict(zip(PARTS, ("bright_black", "blue", "yellow", "red", "magenta", "cyan", "white"), strict=True))
_BLOCKS = dict(zip(PARTS, "·█▒~+░-", strict=True))
_LETTERS = dict(zip(PARTS, ".#cb+w-", strict=True))


def render(summary: Summary) -> RenderableType:
    """Return the summary as one renderable: the verdict, predicted beside measured, the split, what is missing."""
    return Group(*_blocks(summary))


def _blocks(summary: Summary) -> Iterator[RenderableType]:
    yield _paragraph(headline(summary), "bold")
    if summary.message:
        yield _paragraph(summary.message, "red" if summary.status == "failed" else "")
    rows = compare(summary)
    yield _comparison(rows, with_predicted=summary.predicted is not None) if rows else Text()
    grid = Table.grid()
    grid.add_column(width=_LABEL_WIDTH, style="dim")
    grid.add_column(max_width=_WIDTH - _LABEL_WIDTH)
    for label, content in _labelled(summary):
        grid.add_row(label, content)
    yield grid
    if summary.page.exists():
        # Apart from the grid: a path is never broken in two, so that it can be copied.
        yield Text.assemble(("Page".ljust(_LABEL_WIDTH), "dim"), clean(summary.page), no_wrap=True, overflow="ignore")


def _paragraph(text: str, style: str) -> Table:
    grid = Table.grid()
    grid.add_column(max_width=_WIDTH)
    grid.add_row(Text(text, style=style))
    return grid


def _comparison(rows: list[Comparison], *, with_predicted: bool) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in ("predicted", "measured", "ratio") if with_predicted else ("measured",):
        table.add_column(name, justify="right", style="bold" if name == "measured" else "")
    for row in rows:
        table.add_row(*row if with_predicted else (row.name, row.measured))
    return table


def _labelled(summary: Summary) -> Iterator[tuple[str, RenderableType]]:
    for advice in advise(summary):
        change = f" Try: {flags_of(advice.change)}" if advice.change else ""
        yield "Next", Text(advice.sentence + change, style="bold")
    if summary.fractions:
        yield "A step", _Bar(summary.fractions)
    if summary.evals:
        step, metrics = summary.evals[-1]
        values = ", ".join(f"{name} {metric_in_words(value)}" for name, value in metrics.items())
        yield "Evaluation", Text(f"{values} (after step {step:,})")
    if summary.wall_s is not None:
        yield "Wall time", format_seconds(summary.wall_s)
    for sentence in summary.staging:
        yield "Pack", Text(sentence)
    for sentence in remarks(summary):
        yield "Note", Text(sentence)
    for sentence in summary.missing:
        yield "Missing", Text(sentence, style="yellow")


class _Bar:
    """What a step is made of, as a bar and its legend."""

    def __init__(self, fractions: list[tuple[str, float]]) -> None:
        self._fractions = fractions

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        signs = _LETTERS if options.ascii_only else _BLOCKS
        cells = min(_BAR_CELLS, options.max_width)
        bar, legend, edge = Text(no_wrap=True), [], 0.0
        for name, fraction in self._fractions:
            count = round((edge + fraction) * cells) - round(edge * cells)
            edge += fraction
            bar.append(signs[name] * count, style=_COLOURS[name])
            legend.append(Text.assemble((signs[name], _COLOURS[name]), f" {name} {percent(fraction)}"))
        yield bar
        yield Columns(legend, padding=(0, 2, 0, 0))

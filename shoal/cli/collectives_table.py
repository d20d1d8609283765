"""What `shoal bench collectives` shows in a terminal, readable without colour."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.bench.collectives import Choice, Measured, fastest_of
from shoal.core.units import format_bytes, format_seconds


def draw_collectives(measured: Measured) -> RenderableType:
    """Return the seconds by size and algorithm, how they compare with what was predicted, and the planner's choices."""
    link = f"{format_bytes(measured.link.bytes_per_s)}/s and {format_seconds(measured.link.latency_s)}"
    heading = f"all-reduce among {measured.workers} workers of this host, ms; between two alone {link}"
    words = [Text(sentence) for sentence in _sentences(measured)]
    return Group(Text(heading), _times(measured), *words, Text(""), _choices(measured.choices()))


def _times(measured: Measured) -> Table:
    table = _table("", *(name.replace("-", "\n", 1) for name in measured.names))
    for size, took in measured.seconds.items():
        best = fastest_of(took)
        cells = [Text(f"*{_ms(took[name])}", style="bold") if name == best else _ms(took[name]) for name in took]
        table.add_row(format_bytes(size), *cells)
    return table


def _sentences(measured: Measured) -> Iterator[str]:
    yield "* the fastest at this size. Each figure is the median over rounds of what the slowest worker took."
    yield f"Measured over predicted, median over sizes: {_listed(measured.over_predicted())}."
    yield f"Times as fast as Gloo, median over sizes: {_listed(measured.times_gloo())}."
    yield from measured.left_out


def _choices(choices: dict[int, Choice]) -> Table:
    table = _table("", "the planner's choice of messages", "the fastest of these", "over the fastest")
    for size, choice in choices.items():
        table.add_row(format_bytes(size), choice.chosen, choice.fastest, f"{choice.over_fastest:.2f}")
    return table


def _listed(ratios: dict[str, float]) -> str:
    return ", ".join(f"{name} {ratio:.3g}" for name, ratio in ratios.items())


def _ms(seconds: float) -> str:
    """Return milliseconds in at most five characters, up to 100 s."""
    ms = 1e3 * seconds
    return f"{ms:.{3 if ms < 1 else 2 if ms < 10 else 1 if ms < 100 else 0}f}"


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for name in columns:
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    return table

"""The page that compares two runs, and the same for a terminal."""

from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.core.files import write_whole
from shoal.core.units import format_seconds
from shoal.report.compare_runs import beside, differences, loss_over_time, verdict_on
from shoal.report.logs.log import clean
from shoal.report.page.figures import HOVER, plain_layout, pointed_layout, thin
from shoal.report.page.sections import Section, bar, bullets, chooser, figure, table, text
from shoal.report.page.sections_time import loss_caption
from shoal.report.page.write import page_of
from shoal.report.summary import Summary
from shoal.report.verdict import headline, percent

_LOOKS = (("var(--compute)", "solid"), ("var(--communication)", "dash"))


def write_comparison(first: Summary, second: Summary, path: Path) -> Path:
    """Write the page about both runs to `path`."""
    write_whole(path, comparison_page(first, second))
    return path


def comparison_page(first: Summary, second: Summary) -> bytes:
    """Return the page about both runs."""
    is_done = first.status == second.status == "done"
    return page_of(
        name=f"{first.run} and {second.run}",
        verdict=verdict_on(first, second),
        status="done" if is_done else f"{first.status}, {second.status}",
        notes=[f"{one.run}: {headline(one)}" for one in (first, second)],
        sections=_sections(first, second),
    )


def render_comparison(first: Summary, second: Summary, page: Path | None) -> RenderableType:
    """Return the comparison for a terminal, with the path of its page if there is one."""
    numbers = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("", clean(first.run), clean(second.run), "ratio"):
        numbers.add_column(Text(name), justify="right" if name else "left")
    for row in beside(first, second):
        numbers.add_row(*(Text(cell) for cell in row.cells))
    changed = Table(box=SIMPLE_HEAD, pad_edge=False)
    for name in ("set differently", clean(first.run), clean(second.run)):
        changed.add_column(Text(name), overflow="fold")
    for cells in differences(first, second):
        changed.add_row(*(Text(clean(cell)) for cell in cells))
    shown: list[RenderableType] = [Text(verdict_on(first, second), style="bold"), numbers]
    if changed.row_count:
        shown.append(changed)
    if page is not None:
        shown.append(Text.assemble(("Page".ljust(11), "dim"), clean(page), no_wrap=True, overflow="ignore"))
    return Group(*shown)


def _sections(first: Summary, second: Summary) -> list[Section]:
    names = (first.run, second.run)
    rows = [row.cells for row in beside(first, second)]
    numbers = table(("", *names, "ratio"), rows, label="Both runs in numbers", bold=3)
    changed = differences(first, second)
    settings = table(("", *names), changed, label="What was set differently") if changed else ""
    missing = [f"{one.run}: {sentence}" for one in (first, second) for sentence in one.missing]
    found = [
        Section("missing", "What is missing", bullets(missing)) if missing else None,
        Section("settings", "What was set differently", settings or "<p>Nothing that the runs have noted.</p>"),
        _split_section(first, second) if first.split or second.split else None,
        _loss_section(first, second) if first.steps or second.steps else None,
        Section("numbers", "Both runs in numbers", numbers),
    ]
    return [one for one in found if one is not None]


def _loss_section(first: Summary, second: Summary) -> Section:
    caption = " ".join(f"{one.run}: {loss_caption(one)}" for one in (first, second) if one.steps)
    steps = figure("loss", "Loss of both runs over steps", caption)
    times = figure("loss-time", "Loss of both runs over training time", f"{caption} Time is the sum of the steps.")
    over_steps, over_time = plain_layout("loss"), pointed_layout("loss", x_title="seconds of training")
    over_steps["showlegend"] = over_time["showlegend"] = True
    figures = {
        "loss": {
            "data": [_line(one, i, over_time=False) for i, one in enumerate((first, second))],
            "layout": over_steps,
        },
        "loss-time": {
            "data": [_line(one, i, over_time=True) for i, one in enumerate((first, second))],
            "layout": over_time,
        },
    }
    body = chooser("loss", "Loss over", [("steps", steps), ("training time", times)])
    return Section("losses", "Loss", body, figures)


def _line(summary: Summary, number: int, *, over_time: bool) -> dict[str, Any]:
    colour, dash = _LOOKS[number]
    shown = thin(summary.losses)
    seconds = loss_over_time(summary)[0] if over_time else []
    return {
        "type": "scatter",
        "name": summary.run,
        "x": [round(seconds[i], 4) if over_time else summary.step_numbers[i] for i in shown],
        "y": [summary.losses[i] for i in shown],
        "mode": "lines",
        "line": {"color": colour, "width": 1.6, "dash": dash},
        "hovertemplate": HOVER,
    }


def _split_section(first: Summary, second: Summary) -> Section:
    longest_s = max(sum(first.split.values()), sum(second.split.values()), 1e-12)
    sides = []
    for one in (first, second):
        total_s = sum(one.split.values())
        # The bars are drawn to one scale: the shorter step has the shorter bar.
        parts = [(name, fraction * total_s / longest_s) for name, fraction in one.fractions]
        words = [f"{percent(f)}, {format_seconds(f * total_s)}" for _, f in one.fractions]
        sides.append(f"<div><h3>{text(one.run)}: {format_seconds(total_s)}</h3>{bar(parts, words)}</div>")
    note = '<p class="note">A steady step, the mean over the workers; both bars have the same scale.</p>'
    body = f'<div class="sides">{"".join(sides)}</div>{note}'
    return Section("time", "Where the time of a step goes", body)

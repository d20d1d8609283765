"""A timeline as a plot and as a table."""

from collections import defaultdict
from typing import Any

from shoal.core.units import format_seconds
from shoal.report.page.figures import pointed_layout
from shoal.report.timeline import KINDS, Timeline
from shoal.report.verdict import counted


def timeline_figure(timeline: Timeline) -> dict[str, Any]:
    """Return one bar a span, a row a worker, from left to right."""
    data = []
    for kind in KINDS:
        spans = [span for span in timeline.spans if span.kind == kind]
        if spans:
            data.append(
                {
                    "type": "bar",
                    "name": kind,
                    "orientation": "h",
                    "y": [span.row for span in spans],
                    "base": [round(1000 * span.start_s, 4) for span in spans],
                    "x": [round(1000 * span.seconds, 4) for span in spans],
                    "text": [span.name for span in spans],
                    "textposition": "none",
                    "marker": {"color": f"var(--{kind})", "line": _edge(kind)},
                    "hovertemplate": "worker %{y}: %{text}, %{x:.4g} ms from %{base:.4g} ms<extra></extra>",
                }
            )
    layout = pointed_layout("worker", x_title="milliseconds") | {"barmode": "overlay", "bargap": 0.25}
    layout["xaxis"]["range"] = [0, 1010 * max((span.start_s + span.seconds for span in timeline.spans), default=1.0)]
    layout["showlegend"] = True
    layout["legend"] |= {"x": 0, "xanchor": "left"}
    layout["yaxis"] |= {"type": "category", "categoryarray": timeline.rows, "autorange": "reversed", "showgrid": False}
    return {"data": data, "layout": layout}


def _edge(kind: str) -> dict[str, Any]:
    """Return the edge of a bar: micro-batches are told apart by theirs, and what is short is still seen by its own."""
    is_compute = kind in ("forward", "backward", "compute")
    return {"width": 0.5, "color": "var(--card)"} if is_compute else {"width": 1, "color": f"var(--{kind})"}


def height_px(timeline: Timeline) -> int:
    """Return how high the plot must be for its rows to be told apart."""
    return max(220, min(1400, 130 + 26 * len(timeline.rows)))


def timeline_caption(timeline: Timeline) -> str:
    """Return the timeline in words."""
    ends: dict[str, float] = defaultdict(float)
    for span in timeline.spans:
        ends[span.row] = max(ends[span.row], span.start_s + span.seconds)
    last = max(ends, key=lambda row: ends[row])
    words = f"{timeline.title.capitalize()} took {format_seconds(ends[last])}"
    workers = {row.split()[0] for row in ends}
    words += f"; worker {last.split()[0]} was the last to end." if len(workers) > 1 else "."
    if timeline.lacking:
        words += f" {counted(timeline.lacking, 'trace')} of it cannot be read."
    if not timeline.why:
        return (
            f"{words} No step was traced, so this is the mean step of each worker, its parts one after the other. "
            "shoal train --trace 100:103 traces steps 100 to 103."
        )
    return f"{words} Traced because: {timeline.why}."


def timeline_rows(timeline: Timeline) -> tuple[list[str], list[list[str]]]:
    """Return the kinds that occur, and for each row its name and the seconds of each kind."""
    kinds = [kind for kind in KINDS if any(span.kind == kind for span in timeline.spans)]
    sums: dict[tuple[str, str], float] = defaultdict(float)
    for span in timeline.spans:
        sums[span.row, span.kind] += span.seconds
    rows = [
        [row, *(format_seconds(sums[row, kind]) if (row, kind) in sums else "-" for kind in kinds)]
        for row in timeline.rows
    ]
    return kinds, rows

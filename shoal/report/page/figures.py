"""The plots of a page as Plotly specs, {data, layout}, built by hand: importing plotly would cost more than the page.

Colours are the page's CSS variables, written var(--name); the page's script puts in their values, light or dark.
"""

from collections.abc import Sequence
from typing import Any

from shoal.report.logs.measured import buckets
from shoal.report.split import PARTS
from shoal.report.summary import Summary

MOST_POINTS = 1000
# Up to so many steps, each is drawn as a mark or a bar of its own; beyond, as a line or an area.
_FEW_STEPS = 60

HOVER = "%{y:.4g}<extra>%{fullData.name}</extra>"
# The signs of several lines in one plot: colours alone do not tell them apart for everybody.
LINES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star", "hexagon")
HUES = (
    "var(--compute)",
    "var(--communication)",
    "var(--optimizer)",
    "var(--bubble)",
    "var(--checkpoint)",
    "var(--ink)",
)


def loss_figure(summary: Summary) -> dict[str, Any]:
    """Return the loss over steps, with the evaluations' losses as points."""
    shown = thin(summary.losses)
    training = {
        "type": "scatter",
        "name": "training",
        "x": [summary.step_numbers[i] for i in shown],
        "y": [summary.losses[i] for i in shown],
        "mode": "lines+markers" if len(shown) <= _FEW_STEPS else "lines",
        "line": {"color": "var(--compute)", "width": 1.6},
        "marker": {"size": 5},
        "hovertemplate": HOVER,
    }
    evals = [(step, metrics["loss"]) for step, metrics in summary.evals if metrics.get("loss") is not None]
    evaluation = {
        "type": "scatter",
        "name": "evaluation",
        "x": [step for step, _ in evals],
        "y": [loss for _, loss in evals],
        "mode": "markers",
        "marker": {"color": "var(--communication)", "size": 9, "symbol": "diamond"},
        "hovertemplate": HOVER,
    }
    layout = plain_layout("loss") | {"showlegend": bool(evals)}
    return {"data": [training, evaluation] if evals else [training], "layout": layout}


def split_figure(summary: Summary) -> dict[str, Any]:
    """Return the parts of a step over steps, stacked, in milliseconds: the mean over the workers."""
    steps = [stretch.first for stretch in summary.stretches]
    parts_ms = [[round(1000 * seconds, 4) for seconds in stretch.parts_s] for stretch in summary.stretches]
    kind = _bars if len(steps) <= _FEW_STEPS else _areas
    columns = zip(PARTS, zip(*parts_ms, strict=True), strict=True)
    data = [kind(name, steps, column) for name, column in columns if any(column)]
    # The first steps may be many times longer: they may leave the top of the plot, the others may not.
    steady = [sum(parts) for parts in parts_ms[summary.warm_up_steps :]] or [1.0]
    layout = plain_layout("milliseconds") | {"barmode": "stack", "bargap": 0.15, "showlegend": False}
    layout["yaxis"] |= {"range": [0, 1.1 * max(steady)]}
    return {"data": data, "layout": layout}


def thin(values: Sequence[float | None], most: int = MOST_POINTS) -> list[int]:
    """Return at most about `most` positions to draw, in order: of each stretch the least and the greatest, so that
    no spike is lost, and one that is not finite, so that no gap is."""
    if len(values) <= most:
        return list(range(len(values)))
    chosen: set[int] = {0, len(values) - 1}
    for stretch in buckets(len(values), most // 2):
        finite = [i for i in stretch if values[i] is not None]
        chosen.update([i for i in stretch if values[i] is None][:1])
        if finite:
            chosen.add(min(finite, key=lambda i: values[i] or 0.0))
            chosen.add(max(finite, key=lambda i: values[i] or 0.0))
    return sorted(chosen)


def _bars(name: str, steps: list[int], values: tuple[float, ...]) -> dict[str, Any]:
    marker = {"color": f"var(--{name})"}
    return {"type": "bar", "name": name, "x": steps, "y": values, "marker": marker, "hovertemplate": HOVER}


def _areas(name: str, steps: list[int], values: tuple[float, ...]) -> dict[str, Any]:
    colour = f"var(--{name})"
    look = {"mode": "lines", "stackgroup": "step", "line": {"width": 0, "color": colour}, "fillcolor": colour}
    return {"type": "scatter", "name": name, "x": steps, "y": values, "hovertemplate": HOVER} | look


def pointed_layout(y_title: str, *, x_title: str = "step") -> dict[str, Any]:
    """Return the same for a plot in which each mark is looked at by itself."""
    return plain_layout(y_title, x_title=x_title) | {"hovermode": "closest", "hoverdistance": 20}


def plain_layout(y_title: str, *, x_title: str = "step") -> dict[str, Any]:
    """Return the look of a plot, with the titles of its axes."""
    axis = {"gridcolor": "var(--line)", "linecolor": "var(--line)", "zeroline": False, "automargin": True}
    spike = {"spikecolor": "var(--muted)", "spikethickness": -1, "spikedash": "solid"}  # negative: without a halo
    return {
        "font": {"family": "var(--font)", "size": 13, "color": "var(--muted)"},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "hovermode": "x unified",
        "hoverdistance": -1,  # wherever the mouse is, the nearest step is shown
        "hoverlabel": {"bgcolor": "var(--card)", "bordercolor": "var(--line)", "font": {"color": "var(--ink)"}},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1, "yanchor": "bottom"},
        "xaxis": axis | spike | {"title": {"text": x_title}, "showgrid": False},
        "yaxis": axis | {"title": {"text": y_title}},
    }

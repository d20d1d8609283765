"""The plots of a page about one thing each: memory, communication, the workers' pace, loading. See figures.py."""

import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from shoal.report.calls import predicted_call_s
from shoal.report.logs.facts import Call, MemoryOver
from shoal.report.page.figures import HUES, LINES, SYMBOLS, plain_layout, pointed_layout, thin
from shoal.report.summary import Summary

# More lines than this cannot be told apart.
MOST_LINES = 6
_MOST_MOMENTS = 400
"""Of memory over a step."""


def memory_figure(shown: list[MemoryOver], predicted_bytes: int | None) -> dict[str, Any]:
    """Return what some workers held over a step, in megabytes, with the predicted peak."""
    data = [_memory_line(over, HUES[i % len(HUES)], LINES[i % len(LINES)]) for i, over in enumerate(shown)]
    layout = pointed_layout("megabytes", x_title="milliseconds of the step")
    layout["yaxis"]["rangemode"] = "tozero"
    layout["showlegend"] = True
    if predicted_bytes:
        ends = [min(over.at_s[0] for over in shown) * 1000, max(over.at_s[-1] for over in shown) * 1000]
        line = {"color": "var(--muted)", "width": 1.4, "dash": "dash"}
        height = predicted_bytes / 1e6
        data.append({"type": "scatter", "name": "predicted peak", "mode": "lines", "x": ends, "y": [height] * 2})
        data[-1] |= {"line": line, "hovertemplate": "%{y:.4g} MB<extra>%{fullData.name}</extra>"}
    return {"data": data, "layout": layout}


def _memory_line(over: MemoryOver, colour: str, dash: str) -> dict[str, Any]:
    kept = thin(over.bytes, _MOST_MOMENTS)
    return {
        "type": "scatter",
        "name": f"worker {over.rank}",
        "x": [round(1000 * over.at_s[i], 4) for i in kept],
        "y": [round(over.bytes[i] / 1e6, 4) for i in kept],
        "text": [over.labels[i] for i in kept],
        "mode": "lines+markers" if len(kept) <= 60 else "lines",
        "line": {"color": colour, "width": 1.6, "dash": dash},
        "marker": {"size": 5},
        "hovertemplate": "%{y:.4g} MB at %{x:.4g} ms %{text}<extra>%{fullData.name}</extra>",
    }


def communication_figure(summary: Summary) -> dict[str, Any]:
    """Return how long a call took by its size: one series a link, collective and algorithm; and what was predicted."""
    series: dict[tuple[str, str, str], list[Call]] = defaultdict(list)
    for call in summary.calls:
        if call.bytes > 0 and call.count > 0 and call.seconds > 0:
            series[call.link, call.op, call.algorithm].append(call)
    data = []
    for i, (key, found) in enumerate(sorted(series.items())):
        ordered = sorted(found, key=lambda call: call.bytes)
        data.append(_calls_line(key, ordered, i))
        predicted = [(call.bytes, predicted_call_s(summary, call)) for call in ordered]
        known = [(size, 1000 * seconds) for size, seconds in predicted if seconds is not None]
        if known:
            data.append(_predicted_line(key, known, i))
    layout = pointed_layout("milliseconds a call", x_title="bytes of a call")
    layout["xaxis"] |= {"type": "log", "exponentformat": "SI"}
    layout["yaxis"] |= {"type": "log", "exponentformat": "none"}
    layout["showlegend"] = True
    layout["legend"] |= {"x": 0, "xanchor": "left"}
    return {"data": data, "layout": layout}


def _calls_line(key: tuple[str, str, str], calls: list[Call], number: int) -> dict[str, Any]:
    link, op, algorithm = key
    return {
        "type": "scatter",
        "name": f"{link}: {op}, {algorithm}",
        "x": [call.bytes for call in calls],
        "y": [round(1000 * call.seconds / call.count, 6) for call in calls],
        "customdata": [[call.count, round(_rate_gbps(call), 4)] for call in calls],
        "mode": "lines+markers",
        "line": {"color": HUES[number % len(HUES)], "width": 1.2},
        "marker": {"size": 8, "symbol": SYMBOLS[number % len(SYMBOLS)]},
        "hovertemplate": "%{x:.4s}B in %{y:.4g} ms, %{customdata[1]:.3g} GB/s, %{customdata[0]} calls"
        "<extra>%{fullData.name}</extra>",
    }


def _predicted_line(key: tuple[str, str, str], points: list[tuple[int, float]], number: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": f"{key[0]}: {key[2]}, predicted",
        "x": [size for size, _ in points],
        "y": [round(milliseconds, 6) for _, milliseconds in points],
        "mode": "lines+markers",
        "line": {"color": HUES[number % len(HUES)], "width": 1.2, "dash": "dot"},
        "marker": {"size": 7, "symbol": f"{SYMBOLS[number % len(SYMBOLS)]}-open"},
        "hovertemplate": "%{x:.4s}B in %{y:.4g} ms<extra>%{fullData.name}</extra>",
    }


def _rate_gbps(call: Call) -> float:
    """Return the bytes of a call over its time, in GB/s: what the caller sees, whatever travels underneath."""
    return call.bytes * call.count / call.seconds / 1e9


def pace_figure(summary: Summary) -> dict[str, Any]:
    """Return how long each worker was busy in a step, over steps, relative to the median of the workers."""
    relative = relative_paces(summary)
    scale = [[0, "var(--compute)"], [0.5, "var(--card)"], [1, "var(--bubble)"]]
    furthest = max((abs(value - 1) for row in relative for value in row if value is not None), default=0.0)
    reach = min(1.0, max(0.1, furthest))
    data = {
        "type": "heatmap",
        "x": list(summary.pace_steps),
        "y": [f"{worker.rank}" for worker in summary.per_worker],
        "z": [[None if value is None else round(value, 3) for value in row] for row in relative],
        "zmin": 1 - reach,
        "zmax": 1 + reach,
        "colorscale": scale,
        "colorbar": {"thickness": 12, "title": {"text": "of the<br>median"}, "outlinewidth": 0},
        "hovertemplate": "worker %{y} from step %{x}: %{z:.2f} of the median<extra></extra>",
    }
    layout = pointed_layout("worker")
    layout["yaxis"] |= {"type": "category", "autorange": "reversed", "showgrid": False}
    return {"data": [data], "layout": layout}


def relative_paces(summary: Summary) -> list[list[float | None]]:
    """Return the paces of the workers, each over the median of all at that time."""
    columns = list(zip(*summary.paces, strict=True))
    medians = []
    for column in columns:
        known = [value for value in column if value is not None]
        medians.append(statistics.median(known) if known else 0.0)
    return [
        [
            value / median if value is not None and median > 0 else None
            for value, median in zip(row, medians, strict=True)
        ]
        for row in summary.paces
    ]


def loading_figure(summary: Summary) -> dict[str, Any]:
    """Return how long training waited for data in a step, over steps: the mean over the workers and the worst."""
    waits: dict[int, list[float]] = defaultdict(list)
    for over in summary.loading_over:
        if over.loading.steps > 0:
            waits[over.step].append(1000 * over.loading.wait_s / over.loading.steps)
    steps = sorted(waits)
    every = -(-len(steps) // 1000) if steps else 1
    shown = [steps[i : i + every] for i in range(0, len(steps), every)]
    kinds: dict[str, Callable[[list[float]], float]]
    kinds = {"mean over the workers": _mean, "the worker that waited longest": max}
    data = [
        {
            "type": "scatter",
            "name": name,
            "x": [group[-1] for group in shown],
            "y": [round(kind([wait for step in group for wait in waits[step]]), 4) for group in shown],
            "mode": "lines+markers" if len(shown) <= 60 else "lines",
            "line": {"color": HUES[i], "width": 1.6, "dash": LINES[i]},
            "hovertemplate": "%{y:.4g} ms<extra>%{fullData.name}</extra>",
        }
        for i, (name, kind) in enumerate(kinds.items())
        if i == 0 or len(summary.loading) > 1
    ]
    layout = plain_layout("milliseconds waited in a step") | {"showlegend": len(data) > 1}
    layout["yaxis"]["rangemode"] = "tozero"
    return {"data": data, "layout": layout}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

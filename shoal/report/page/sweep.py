"""The page about a sweep, made of its sweep.json alone: every trial's value, and how it goes with each parameter."""

import json
import math
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.files import write_whole
from shoal.report.page.figures import pointed_layout
from shoal.report.page.sections import figure, section, text
from shoal.report.page.write import fill_page

_MOST_PARAMETERS = 12
_ROWS = 50
_COLOURS = {"complete": "var(--backward)", "pruned": "var(--data)"}


def write_sweep_page(folder: Path) -> Path:
    """Write the sweep's report.html and return its path."""
    try:
        sweep = json.loads((folder / "sweep.json").read_text())
    except (OSError, ValueError):
        raise ConfigError(f"{folder} is not the folder of a sweep (it has no sweep.json).") from None
    path = folder / "report.html"
    write_whole(path, _page(sweep))
    return path


def _page(sweep: dict[str, Any]) -> bytes:
    best = sweep["best"]
    headline = f"{_word(best['value'])} in trial {best['number']} is the best" if best else "No trial is complete yet"
    status = "done" if sweep["complete"] + sweep["pruned"] >= sweep["wanted"] else "unfinished"
    counts = f"{sweep['complete']} complete, {sweep['pruned']} pruned, {sweep['failed']} failed."
    names = parameter_names(sweep)
    parts = [section("Every trial", figure("history", "Values over trials", f"{_caption(sweep)} {counts}"), "losses")]
    figures = {"history": history_figure(sweep)}
    for number, name in enumerate(names[:_MOST_PARAMETERS]):
        figures[f"parameter-{number}"] = parameter_figure(sweep, name)
        place = figure(f"parameter-{number}", f"Values over {name}", f"Each point is a trial with its {name}.")
        parts.append(section(text(name), place, f"parameter-section-{number}"))
    parts.append(section("The best", _table(sweep, names), "evaluations"))
    return fill_page(sweep["file"], headline, status=status, body="\n".join(parts), figures=figures)


def parameter_names(sweep: dict[str, Any]) -> list[str]:
    """Return the parameters of all trials, in the order in which they first came."""
    return list(dict.fromkeys(name for trial in sweep["trials"] for name in trial["parameters"]))


def history_figure(sweep: dict[str, Any]) -> dict[str, Any]:
    """Return every trial's value by its number, with the best so far as a line."""
    better = max if sweep["direction"] == "maximize" else min
    numbers, so_far = [], []
    best = None
    for trial in _with_value(sweep, "complete"):
        best = trial["value"] if best is None else better(best, trial["value"])
        numbers.append(trial["number"])
        so_far.append(best)
    line = {
        "type": "scatter",
        "name": "best so far",
        "x": numbers,
        "y": so_far,
        "mode": "lines",
        "line": {"color": "var(--communication)", "width": 1.6, "shape": "hv"},
    }
    layout = pointed_layout("value", x_title="trial")
    return {"data": [*_points(sweep, lambda trial: trial["number"]), line], "layout": layout}


def parameter_figure(sweep: dict[str, Any], name: str) -> dict[str, Any]:
    """Return every trial's value by one of its parameters; numbers over three powers of ten on a logarithmic axis."""
    values = [trial["parameters"][name] for trial in sweep["trials"] if name in trial["parameters"]]
    numbers = [value for value in values if isinstance(value, (int, float)) and not isinstance(value, bool)]
    layout = pointed_layout("value", x_title=name)
    if len(numbers) < len(values):
        layout["xaxis"]["type"] = "category"
        return {"data": _points(sweep, lambda trial: _word(trial["parameters"].get(name)), name), "layout": layout}
    if min(numbers) > 0 and math.log10(max(numbers) / min(numbers)) > 1.5:
        layout["xaxis"]["type"] = "log"
    return {"data": _points(sweep, lambda trial: trial["parameters"].get(name), name), "layout": layout}


def _points(sweep: dict[str, Any], x_of: Any, name: str | None = None) -> list[dict[str, Any]]:
    found = []
    for state, colour in _COLOURS.items():
        trials = [t for t in _with_value(sweep, state) if name is None or name in t["parameters"]]
        if trials:
            found.append(
                {
                    "type": "scatter",
                    "name": state,
                    "mode": "markers",
                    "x": [x_of(trial) for trial in trials],
                    "y": [trial["value"] for trial in trials],
                    "text": [f"trial {trial['number']}" for trial in trials],
                    "marker": {"color": colour, "size": 7},
                    "hovertemplate": "%{text}: %{y:.4g}<extra></extra>",
                }
            )
    return found


def _with_value(sweep: dict[str, Any], state: str) -> list[dict[str, Any]]:
    """Return the trials in `state` whose value can be drawn: what is infinite stands in sweep.json as a word."""
    return [t for t in sweep["trials"] if t["state"] == state and isinstance(t["value"], (int, float))]


def _caption(sweep: dict[str, Any]) -> str:
    best = sweep["best"]
    if not best:
        return "No trial is complete."
    word = "highest" if sweep["direction"] == "maximize" else "lowest"
    return f"The {word} value was {_word(best['value'])}, of trial {best['number']}."


def _table(sweep: dict[str, Any], names: list[str]) -> str:
    sign = -1 if sweep["direction"] == "maximize" else 1
    trials = sorted(_with_value(sweep, "complete"), key=lambda t: (sign * t["value"], t["number"]))[:_ROWS]
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in ("trial", "value", *names))
    rows = "".join(
        f'<tr><th scope="row">{t["number"]}</th><td class="measured">{t["value"]:.6g}</td>'
        + "".join(f"<td>{text(_word(t['parameters'].get(name, '')))}</td>" for name in names)
        + "</tr>"
        for t in trials
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _word(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)

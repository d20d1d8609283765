"""The page about a run: one file that needs nothing else, neither a server nor a network."""

import importlib.util
import json
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from shoal.core.files import write_whole
from shoal.core.run_folder import RunFolder
from shoal.report import sections
from shoal.report.figures import loss_figure, split_figure
from shoal.report.sections import figure, section, text
from shoal.report.summary import Summary, summarize
from shoal.report.verdict import headline, remarks

_KNOWN_STATUS = ("done", "failed", "stopped", "unfinished")
_PLACES = ("missing", "loss", "split", "predicted", "workers", "evaluations", "circumstances")


def write_page(run: RunFolder, summary: Summary | None = None) -> Path:
    """Write the run's report.html and return its path; a caller that has the run's summary spares reading it again."""
    write_whole(run.report_html, _page(summary or summarize(run)))
    return run.report_html


def _page(summary: Summary) -> bytes:
    """Return the whole page."""
    return _filled(_words(summary) | _sections(summary))


def fill_page(name: str, verdict: str, *, status: str, body: str, figures: dict[str, Any]) -> bytes:
    """Return a page of another kind in the same dress: `body` is HTML, with a place for each of the `figures`."""
    values = dict.fromkeys(_PLACES, "") | {"message": "", "remarks": "", "loss": body}
    values |= {"title": text(f"{name}: {verdict}"), "run": text(name), "verdict": text(verdict)}
    values |= {"status": text(status), "status_class": status, "figures": _json_for_html(figures)}
    return _filled(values)


def _filled(values: dict[str, str]) -> bytes:
    """Return the template with `values`. Plotly's megabytes are put in as they are, without decoding them (0.02 s)."""
    plotly = _plotly_source()
    values["footer"] = "" if plotly else "The plots are left out: the package plotly is not installed."
    template = resources.files("shoal.report").joinpath("page.html").read_text(encoding="utf-8")
    before, after = (Template(half).substitute(values).encode() for half in template.split("$plotly"))
    return before + plotly + after


def _words(summary: Summary) -> dict[str, str]:
    figures = {"loss": loss_figure(summary), "split": split_figure(summary)} if summary.steps else {}
    return {
        "title": text(f"{summary.run}: {headline(summary)}"),
        "run": text(summary.run),
        "status": text(summary.status),
        "status_class": summary.status if summary.status in _KNOWN_STATUS else "unknown",
        "verdict": text(headline(summary)),
        "message": f'<p class="message">{text(summary.message)}</p>' if summary.message else "",
        "remarks": sections.bullets(remarks(summary), "remarks"),
        "figures": _json_for_html(figures),
    }


def _sections(summary: Summary) -> dict[str, str]:
    """Return the page's sections by their place in the template; what the run has nothing for is empty."""
    found = dict.fromkeys(_PLACES, "")
    if summary.missing:
        found["missing"] = section("What is missing", sections.bullets(summary.missing), "missing")
    if summary.steps:
        found["loss"] = section("Loss", figure("loss", "Loss over steps", sections.loss_caption(summary)), "losses")
        caption = sections.split_caption(summary)
        body = figure("split", "The parts of each step over steps", caption, above=sections.split_bar(summary))
        found["split"] = section("Where the time of a step goes", body, "time")
    if summary.steps or any(worker.error for worker in summary.per_worker):
        found["workers"] = section("Each worker", sections.worker_table(summary), "each-worker")
    if summary.steps or summary.predicted:
        found["predicted"] = section("Predicted and measured", sections.predicted_table(summary), "predicted")
    if summary.evals:
        found["evaluations"] = section("Evaluations", sections.evaluation_table(summary), "evaluations")
    pairs = sections.definitions(sections.circumstances(summary))
    found["circumstances"] = section("Plan and circumstances", pairs, "circumstances")
    return found


def _plotly_source() -> bytes:
    """Return plotly.min.js, found without importing plotly (0.07 s); empty when it is not there."""
    spec = importlib.util.find_spec("plotly")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder, "package_data", "plotly.min.js")
        if path.is_file():
            return path.read_bytes().replace(b"</script", b"<\\/script")
    return b""


def _json_for_html(value: Any) -> str:
    """Return JSON that cannot end the script element it stands in."""
    plain = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return plain.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

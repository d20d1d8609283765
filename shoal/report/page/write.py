"""The page about a run: one file that needs nothing else, neither a server nor a network."""

import importlib.util
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from shoal.core.files import write_whole
from shoal.core.run_folder import RunFolder
from shoal.report.advice import Advice, advise
from shoal.report.page import sections_detail, sections_plan, sections_time
from shoal.report.page.sections import Section, bullets, contents, section, text
from shoal.report.summary import Summary, summarize
from shoal.report.timeline import Timeline, read_timelines
from shoal.report.verdict import headline, remarks, verdict

_KNOWN_STATUS = ("done", "failed", "stopped", "unfinished")


def write_page(run: RunFolder, summary: Summary | None = None) -> Path:
    """Write the run's report.html and return its path; a caller that has the run's summary spares reading it again."""
    known = summary or summarize(run)
    write_whole(run.report_html, _page(known, read_timelines(run, known)))
    return run.report_html


def _page(summary: Summary, timelines: Sequence[Timeline]) -> bytes:
    advices = advise(summary)
    notes = [headline(summary), *remarks(summary)] if advices else list(remarks(summary))
    return page_of(
        name=summary.run,
        verdict=verdict(summary),
        status=summary.status,
        message=summary.message,
        notes=notes,
        sections=_sections(summary, advices, timelines),
    )


def _sections(summary: Summary, advices: Sequence[Advice], timelines: Sequence[Timeline]) -> list[Section]:
    """Return the page's sections in order; what the run has nothing for is left out."""
    has_steps = summary.steps > 0
    has_words = has_steps or any(worker.error for worker in summary.per_worker)
    found = [
        sections_time.missing_section(summary),
        sections_time.advice_section(advices),
        sections_time.loss_section(summary) if has_steps else None,
        sections_time.split_section(summary) if has_steps else None,
        sections_time.timeline_section(timelines, summary),
        sections_detail.memory_section(summary),
        sections_detail.communication_section(summary),
        sections_detail.predicted_section(summary) if has_steps or summary.predicted else None,
        sections_time.straggler_section(summary),
        sections_time.worker_section(summary) if has_words else None,
        sections_detail.fault_section(summary),
        sections_detail.checkpoint_section(summary),
        sections_detail.data_section(summary),
        sections_time.evaluation_section(summary),
        sections_plan.plan_section(summary),
        sections_plan.circumstances_section(summary),
    ]
    return [one for one in found if one is not None]


def page_of(
    *, name: str, verdict: str, status: str, sections: Sequence[Section], message: str = "", notes: Sequence[str] = ()
) -> bytes:
    """Return a whole page; all words are escaped here but the sections' bodies, which are HTML."""
    figures = {plot_id: figure for one in sections for plot_id, figure in one.figures.items()}
    values = {
        "title": text(f"{name}: {verdict}"),
        "run": text(name),
        "status": text(status),
        "status_class": status if status in _KNOWN_STATUS else "unknown",
        "verdict": text(verdict),
        "message": f'<p class="message">{text(message)}</p>' if message else "",
        "remarks": bullets(notes, "remarks"),
        "contents": contents(sections),
        "body": "\n".join(section(one.title, one.body, one.name) for one in sections),
        "figures": _json_for_html(figures),
    }
    return _filled(values)


def fill_page(name: str, verdict: str, *, status: str, body: str, figures: dict[str, Any]) -> bytes:
    """Return a page of another kind in the same dress: `body` is HTML, with a place for each of the `figures`."""
    values = {"title": text(f"{name}: {verdict}"), "run": text(name), "verdict": text(verdict), "contents": ""}
    values |= {"status": text(status), "status_class": status, "message": "", "remarks": ""}
    return _filled(values | {"body": body, "figures": _json_for_html(figures)})


def _filled(values: dict[str, str]) -> bytes:
    """Return the template with `values`. Plotly's megabytes are put in as they are, without decoding them (0.02 s)."""
    plotly = plotly_source()
    values["footer"] = "" if plotly else "The plots are left out: the package plotly is not installed."
    template = resources.files("shoal.report.page").joinpath("page.html").read_text(encoding="utf-8")
    before, after = (Template(half).substitute(values).encode() for half in template.split("$plotly"))
    return before + plotly + after


def plotly_source() -> bytes:
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

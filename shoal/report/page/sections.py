"""The parts that pages are made of, as HTML. Whatever comes from a run is escaped here: `text` is the only way in."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

from shoal.report.logs.log import clean


class Section(NamedTuple):
    """A titled section of a page; `name` and `title` are our own words, `body` is HTML, `figures` its plots."""

    name: str
    title: str
    body: str
    figures: dict[str, Any] = {}  # noqa: RUF012


def text(value: object) -> str:
    """Return any value as text that is safe in HTML, in attributes too."""
    return escape(clean(value), quote=True)


def section(title: str, body: str, kind: str = "") -> str:
    """Return a titled section; `title` and `kind` are our own words, `body` is HTML."""
    name = kind or title.lower().replace(" ", "-").replace(",", "")
    return (
        f'<section class="{name}" id="{name}-section" aria-labelledby="{name}-title">'
        f'<h2 id="{name}-title">{title}</h2>\n{body}</section>'
    )


def contents(sections: Sequence[Section]) -> str:
    """Return links to the sections, for whoever does not want to scroll through all."""
    items = "".join(f'<li><a href="#{one.name}-section">{one.title}</a></li>' for one in sections)
    return f'<nav aria-label="Sections"><ul>{items}</ul></nav>' if len(sections) > 1 else ""


def bullets(sentences: Iterable[str], css_class: str = "") -> str:
    """Return a list of sentences, or nothing when there is none."""
    items = "".join(f"<li>{text(sentence)}</li>" for sentence in sentences)
    return f'<ul class="{css_class}">{items}</ul>' if items else ""


def figure(plot_id: str, label: str, caption: str, above: str = "", *, height_px: int | None = None) -> str:
    """Return the place of a plot; `caption` says in words what the plot shows, for whoever cannot see it."""
    style = f' style="height:{height_px}px"' if height_px else ""
    plot = f'<div class="plot" id="{plot_id}" role="img" aria-label="{text(label)}. {text(caption)}"{style}></div>'
    return f"<figure>{above}{plot}<figcaption>{text(caption)}</figcaption></figure>"


def table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, label: str, caption: str = "", bold: int | None = None
) -> str:
    """Return a table whose cells are text; it scrolls by itself where the page is too narrow. `bold` is a column."""
    top = "".join(f'<th scope="col">{text(name)}</th>' for name in head)
    body = "".join(_row(row, bold) for row in rows)
    said = f"<caption>{text(caption)}</caption>" if caption else ""
    inner = f"<table>{said}<thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" role="region" aria-label="{text(label)}, table" tabindex="0">{inner}</div>'


def _row(row: Sequence[str], bold: int | None) -> str:
    cells = "".join(
        f'<td class="measured">{text(cell)}</td>' if i == bold else f"<td>{text(cell)}</td>"
        for i, cell in enumerate(row[1:], start=1)
    )
    return f'<tr><th scope="row">{text(row[0])}</th>{cells}</tr>'


def folded(title: str, body: str) -> str:
    """Return `body` folded up under `title`."""
    return f"<details><summary>{text(title)}</summary>{body}</details>"


def definitions(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and their values, a value of HTML each."""
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs) + "</dl>"


def bar(fractions: Sequence[tuple[str, float]], words: Sequence[str]) -> str:
    """Return parts of a whole as one bar with a legend; `words` stand in the legend behind each name."""
    cells = "".join(f'<span style="width:{100 * f:.2f}%;background:var(--{name})"></span>' for name, f in fractions)
    legend = "".join(
        f'<li><i style="background:var(--{name})"></i>{name} <b>{text(word)}</b></li>'
        for (name, _), word in zip(fractions, words, strict=True)
    )
    return f'<div class="split" aria-hidden="true">{cells}</div><ul class="legend">{legend}</ul>'


def chooser(name: str, label: str, choices: Sequence[tuple[str, str]]) -> str:
    """Return one of several bodies, to be chosen by its title; without scripts all are shown."""
    if len(choices) == 1:
        return choices[0][1]
    options = "".join(f'<option value="{i}">{text(title)}</option>' for i, (title, _) in enumerate(choices))
    bodies = "".join(f'<div data-choice-of="{name}">{body}</div>' for _, body in choices)
    return (
        f'<p class="chooser"><label for="{name}-choice">{text(label)}</label> '
        f'<select id="{name}-choice" data-chooses="{name}">{options}</select></p>{bodies}'
    )

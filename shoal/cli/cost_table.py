"""What `shoal cost` shows in a terminal, readable without colour."""

import math
from collections.abc import Iterator, Mapping

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.core.units import format_bytes, format_seconds
from shoal.planner.collectives.allreduce import Cost
from shoal.planner.collectives.codecs import Codec
from shoal.planner.collectives.compression import Setting, Side, Verdict
from shoal.planner.collectives.contest import Contest
from shoal.spec.device import Link


def draw_contest(contest: Contest, labels: Mapping[str, str], *, nodes: bool = False) -> RenderableType:
    """Return the contest as a table, who wins, and who would win at other sizes.

    `labels` go behind the names; with `nodes`, what stays inside a node has its own column.
    """
    table = _table("", "steps", "busiest sends", *(["inside"] if nodes else []), "time", "of ideal", "")
    table.add_row(*_row("ideal", contest.ideal, contest.ideal, nodes=nodes), "", style="dim")
    for name, cost in contest.costs.items():
        wins = name == contest.winner
        row = _row(f"{name}{labels.get(name, '')}", cost, contest.ideal, nodes=nodes)
        table.add_row(*row, "wins" if wins else "", style="bold" if wins else "")
    heading = f"{contest.collective} of {format_bytes(contest.num_bytes)} among {_workers(contest.workers)}"
    notes = ["Only two-level knows the nodes: of the others, every message goes over --link."] if nodes else []
    return Group(Text(f"{heading}; {_link(contest.link)}"), table, *map(Text, [*_sentences(contest), *notes]))


def _row(name: str, cost: Cost, ideal: Cost, *, nodes: bool) -> Iterator[str]:
    yield name
    yield f"{cost.steps:,}"
    yield format_bytes(cost.bytes_per_worker)
    if nodes:
        yield format_bytes(cost.inside_bytes) if cost.inside_bytes else ""
    yield format_seconds(cost.seconds)
    ratio = cost.seconds / ideal.seconds if ideal.seconds else math.nan
    yield "" if math.isnan(ratio) else f"{ratio:.3f}" if ratio < 9.9995 else f"{ratio:,.1f}"


def _sentences(contest: Contest) -> Iterator[str]:
    if not contest.by_size:
        yield "One worker has nothing to send."
        return
    names = [name for _, name in contest.by_size]
    ends = [format_bytes(size) for size, _ in contest.by_size[1:]]
    if not ends:
        yield f"On this link {names[0]} wins at every size."
        return
    parts = [f"{name} up to {end}" for name, end in zip(names, ends, strict=False)]
    yield f"By size, on this link: {', '.join(parts)}, {names[-1]} above."


def draw_verdict(name: str, codec: Codec, setting: Setting, verdict: Verdict) -> RenderableType:
    """Return both sides of the inequality, and where the answer would change."""
    table = _table("", "original", name)
    gradient_bytes = (setting.num_bytes, setting.num_bytes * codec.ratio)
    table.add_row("gradient", *map(format_bytes, gradient_bytes))
    for label, cells in _rows(verdict.original, verdict.compressed, overlap=setting.overlap_s > 0):
        table.add_row(label, *cells, style="bold" if label == "T * I" else "")
    heading = f"gradients of {format_bytes(setting.num_bytes)} among {_workers(setting.workers)}"
    link = Link(source="", bytes_per_s=setting.link_bytes_per_s, latency_s=setting.latency_s)
    return Group(Text(f"{heading}; {_link(link)}"), table, *map(Text, _verdict_sentences(name, verdict)))


def _rows(original: Side, compressed: Side, *, overlap: bool) -> Iterator[tuple[str, list[str]]]:
    sides = (original, compressed)
    yield "sent by a worker", [format_bytes(side.bytes_per_worker) for side in sides]
    yield "compute", [format_seconds(side.compute_s) for side in sides]
    yield "encode", ["", format_seconds(compressed.encode_s)]
    yield "exchange", [f"{side.exchange} {format_seconds(side.exchange_s)}" for side in sides]
    if overlap:
        yield "exposed", [format_seconds(side.exposed_s) for side in sides]
    yield "decode", ["", format_seconds(compressed.decode_s)]
    yield "step, T", [format_seconds(side.step_s) for side in sides]
    yield "iterations, I", [f"{side.iterations:g}" for side in sides]
    yield "T * I", [format_seconds(side.total_s) for side in sides]


def _verdict_sentences(name: str, verdict: Verdict) -> Iterator[str]:
    original_s, compressed_s = verdict.original.total_s, verdict.compressed.total_s
    sign, verb = ("<", "pays") if verdict.pays else (">=", "does not pay")
    ratio = f" ({compressed_s / original_s:.2f} of the time)" if original_s else ""
    yield f"T_comp * I_comp {sign} T_orig * I_orig: {name} {verb}{ratio}."
    if not verdict.compressed.encode_s and name != "none":
        yield "Encoding counts as free: --encode-rate says how fast it is."
    yield f"Break-even: {_growth(verdict)}. {_links(verdict)}."


def _growth(verdict: Verdict) -> str:
    growth = verdict.break_even_iterations
    return f"{growth:.3g} times the iterations" if growth < math.inf else "any number of iterations"


def _links(verdict: Verdict) -> str:
    ranges = [_range(low, high) for low, high in verdict.paying_links]
    return f"It pays on {' and on '.join(ranges)}" if ranges else "It pays on no link"


def _range(low: float, high: float) -> str:
    slowest, fastest = f"{format_bytes(low)}/s", f"{format_bytes(high)}/s"
    if low == 0:
        return "any link" if math.isinf(high) else f"links slower than {fastest}"
    return f"links faster than {slowest}" if math.isinf(high) else f"links of {slowest} to {fastest}"


def _table(*columns: str) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True, padding=(0, 1))
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if name and index else "left")
    return table


def _workers(count: int) -> str:
    return f"{count:,} worker{'s' if count > 1 else ''}"


def _link(link: Link) -> str:
    return f"links of {format_bytes(link.bytes_per_s)}/s and {format_seconds(link.latency_s)}"

"""The ranking of plans for a terminal: one column a plan, then why the others lost. Readable without colour."""

from collections.abc import Callable, Iterator, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shoal.core.units import format_bytes, format_count, format_seconds
from shoal.planner.search.ranked import Ranked
from shoal.planner.search.ranking import Ranking
from shoal.planner.search.validate import axes

_LABEL_WIDTH = 15
_WIDTH = 96

Cell = Callable[[Ranked], str]


def render(ranking: Ranking, *, title: str) -> RenderableType:
    """Return the ranking as one renderable."""
    return Group(*_blocks(ranking, title))


def _blocks(ranking: Ranking, title: str) -> Iterator[RenderableType]:
    best = ranking.plans[0]
    yield Text(title, style="bold")
    yield Text(
        f"Best: {axes(best.plan.mesh)}: {format_seconds(best.time.step_s)} a step ± {ranking.error:.0%}, "
        f"{_rate(best.samples_per_s)} samples/s"
    )
    yield table(ranking.plans)
    yield from _labelled("Others", ranking.lost)
    yield from _labelled("Notes", _notes(ranking))


def table(plans: Sequence[Ranked]) -> Table:
    """Return the table of `plans`: what they are, what a step takes and is made of, what they hold and send."""
    out = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    out.add_column("", style="dim", no_wrap=True)
    for number in range(1, len(plans) + 1):
        out.add_column(f"plan {number}", justify="right", no_wrap=True)
    for section in (_MESH, _TIME, _REST):
        for label, cell in section:
            cells = [cell(ranked) for ranked in plans]
            if any(text not in ("", "-") for text in cells):
                out.add_row(label, *cells, style="bold" if label == "step" else "")
        out.add_section()
    return out


def _axis(name: str) -> Cell:
    return lambda ranked: _unless_one(getattr(ranked.plan.mesh, name))


def _part(name: str) -> Cell:
    def cell(ranked: Ranked) -> str:
        seconds = getattr(ranked.time, name)
        return format_seconds(seconds) if seconds >= 1e-6 else "-"

    return cell


def _schedule(ranked: Ranked) -> str:
    plan = ranked.plan
    if plan.mesh.pipeline == 1:
        return "-"
    return f"interl. x{plan.chunks}" if plan.chunks > 1 else plan.schedule  # short: five plans in 80 columns


def _sync(ranked: Ranked) -> str:
    sync = ranked.plan.sync
    if ranked.plan.mesh.data == 1:
        return "-"
    how = {"server": f"{sync.servers} servers", "local": f"every {sync.local_steps} steps"}.get(sync.mode, "")
    return " ".join(word for word in (how, "" if sync.codec == "none" else sync.codec) if word) or "-"


def _shares(ranked: Ranked) -> str:
    shares = ranked.plan.batch.shares
    return f"{min(shares):.1%} to {max(shares):.1%}" if shares else "-"


def _sent(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else "-"


def _unless_one(count: int) -> str:
    return f"{count:,}" if count > 1 else "-"


def _rate(samples_per_s: float) -> str:
    return f"{samples_per_s:.3g}" if samples_per_s < 1000 else format_count(samples_per_s)


_MESH: list[tuple[str, Cell]] = [
    ("workers", lambda ranked: f"{ranked.plan.workers:,}"),
    ("  tensor", _axis("tensor")),
    ("  pipeline", _axis("pipeline")),
    ("  replicate", _axis("replicate")),
    ("  shard", _axis("shard")),
    ("zero", lambda ranked: str(ranked.plan.zero) if ranked.plan.zero else "-"),
    ("micro-batch", lambda ranked: str(ranked.plan.batch.micro_batch or "whole")),
    ("recompute", lambda ranked: ranked.plan.recompute if ranked.plan.recompute != "none" else "-"),
    ("schedule", _schedule),
    ("sync", _sync),
    ("shares", _shares),
]
_TIME: list[tuple[str, Cell]] = [
    ("step", lambda ranked: format_seconds(ranked.time.step_s)),
    ("  compute", _part("compute_s")),
    ("    again", lambda ranked: format_seconds(ranked.recompute_s) if ranked.recompute_s > 0 else "-"),
    ("  tensor", _part("tensor_s")),
    ("  pipeline", _part("pipeline_s")),
    ("  data", _part("data_s")),
    ("  bubble", _part("bubble_s")),
    ("  optimizer", _part("optimizer_s")),
]
_REST: list[tuple[str, Cell]] = [
    ("samples/s", lambda ranked: _rate(ranked.samples_per_s)),
    ("memory", lambda ranked: format_bytes(ranked.needed_bytes)),
    ("sent in node", lambda ranked: _sent(ranked.time.inside_bytes)),
    ("sent outside", lambda ranked: _sent(ranked.time.between_bytes)),
]


def _notes(ranking: Ranking) -> Iterator[str]:
    yield from ranking.notes
    yield f"Step times are good to ± {ranking.error:.0%} ({ranking.error_source})."
    if ranking.room_bytes is not None:
        yield (
            f"Memory is what the worst worker's device must have, its error bar included; it has "
            f"{format_bytes(ranking.room_bytes)}. Worst moment of plan 1: {ranking.plans[0].peak.moment}."
        )
    kept = ranking.reliability
    yield (
        f"A checkpoint every {_long(kept.interval_s)}, as one takes {format_seconds(kept.stall_s)} and a failure is to "
        f"be expected every {_long(kept.mtbf_s)}: {kept.lost_fraction:.2%} of the time goes into both."
    )


def _long(seconds: float) -> str:
    days = seconds / 86400
    return f"{days:.3g} days" if days >= 2 else format_seconds(seconds)


def _labelled(label: str, lines: "Sequence[str] | Iterator[str]") -> Iterator[RenderableType]:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=7, style="dim")
    grid.add_column(max_width=_WIDTH - 8)
    for number, line in enumerate(lines):
        grid.add_row("" if number else label, Text(line))
    if grid.row_count:
        yield grid

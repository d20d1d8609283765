"""The workers of a run as lines of a terminal: a table of few, a grid of many, and counts where there is no room."""

import math

from rich.text import Text

from shoal.core.units import format_bytes
from shoal.report.live.state import TROUBLE, LiveState, WorkerState

_MOST_ROWS = 8
"""A table of more is harder to read than a grid."""
_MEMORY_MARGIN = 1.2
"""Times the prediction: `shoal plan` says itself that it may be off by a fifth."""
_SIGNS = {
    "starting": ("…", ".", "bright_black"),
    "running": ("●", "o", "green"),
    "waiting": ("◌", "w", "yellow"),
    "late": ("▲", "L", "yellow"),
    "silent": ("?", "?", "yellow"),
    "blamed": ("◆", "B", "red"),
    "lost": ("✗", "x", "red"),
    "failed": ("✗", "X", "red"),
    "stopped": ("■", "s", "bright_black"),
    "done": ("✓", "+", "green"),
}
"""Of each state: its sign, its letter where the terminal knows only ASCII, and its colour."""


def worker_lines(state: LiveState, *, width: int, room: int, is_ascii: bool) -> list[Text]:
    """Return the workers in `room` lines at most."""
    workers = state.workers
    if not workers:
        return []
    if len(workers) <= min(_MOST_ROWS, room):
        return _table(workers, width, is_ascii=is_ascii)
    troubled = [worker for worker in workers if worker.state in TROUBLE]
    grid = _grid(workers, width, is_ascii=is_ascii)
    counts = _counts(state, is_ascii=is_ascii)
    exceptions = [_exception(worker, is_ascii=is_ascii) for worker in troubled[:_MOST_ROWS]]
    if len(troubled) > len(exceptions):
        exceptions.append(Text(f"and {len(troubled) - len(exceptions)} more"))
    if 1 + len(grid) + len(exceptions) <= room:
        return [counts, *grid, *exceptions]
    return [counts, *exceptions][:room]


def percent(fraction: float) -> str:
    """Return '7%', or 'under 1%' for the little that would round to nothing."""
    return "under 1%" if 0 < fraction < 0.005 else f"{fraction:.0%}"


def is_over_prediction(worker: WorkerState) -> bool:
    """Return whether the worker has held more memory than was predicted, and a margin on top."""
    return (worker.peak_bytes or 0) > _MEMORY_MARGIN * (worker.predicted_bytes or math.inf)


def _table(workers: tuple[WorkerState, ...], width: int, *, is_ascii: bool) -> list[Text]:
    """Return a row for each worker; columns that have no room are left out, the last first."""
    columns = [[_cell(worker, is_ascii=is_ascii) for worker in workers]]
    with_hosts = len({worker.host for worker in workers}) > 1
    for words in (_share, _memory, _waits, _host):
        texts = [words(worker) for worker in workers]
        if any(texts) and (with_hosts or words is not _host):
            styles = ["yellow" if words is _memory and is_over_prediction(worker) else "" for worker in workers]
            columns.append([Text(text, style=style) for text, style in zip(texts, styles, strict=True)])
    rows = [Text() for _ in workers]
    used = 0
    for number, column in enumerate(columns):
        cells = max(text.cell_len for text in column)
        gap = 2 if number else 0
        if number and used + gap + cells > width:
            break
        used += gap + cells
        for row, text in zip(rows, column, strict=True):
            row.append(" " * gap).append_text(text).append(" " * (cells - text.cell_len))
    for row in rows:
        row.rstrip()
    return rows


def _grid(workers: tuple[WorkerState, ...], width: int, *, is_ascii: bool) -> list[Text]:
    """Return a cell for each worker: its number, the sign of its state and its share, if there is room for that."""
    digits = len(str(workers[-1].rank))
    shares = [f"{worker.share:.1%}" if worker.share is not None else "" for worker in workers]
    share_cells = max(map(len, shares)) if width >= 60 else 0
    cell = digits + 2 + (1 + share_cells if share_cells else 0)
    columns = max(1, (width + 1) // (cell + 1))
    columns -= columns % (8 if columns > 8 else 4) if columns > 4 else 0  # nodes have 4 or 8 workers
    lines = []
    for first in range(0, len(workers), columns):
        line = Text()
        for worker, share in list(zip(workers, shares, strict=True))[first : first + columns]:
            line.append(f"{worker.rank:>{digits}} ", style="dim").append_text(_sign(worker, is_ascii=is_ascii))
            line.append(f" {share:>{share_cells}}" if share_cells else "").append(" ")
        line.rstrip()
        lines.append(line)
    return lines


def _counts(state: LiveState, *, is_ascii: bool) -> Text:
    text = Text(f"{len(state.workers)} workers: ")
    for number, (name, count) in enumerate(state.counts.items()):
        sign, letter, colour = _SIGNS[name]
        text.append(", " if number else "").append(f"{letter if is_ascii else sign} ", style=colour)
        text.append(f"{count} {name}")
    return text


def _sign(worker: WorkerState, *, is_ascii: bool) -> Text:
    sign, letter, colour = _SIGNS[worker.state]
    return Text(letter if is_ascii else sign, style=colour)


def _cell(worker: WorkerState, *, is_ascii: bool) -> Text:
    words = " ".join(worker.words.split())[:60]  # an error may be long: it is printed elsewhere
    return Text.assemble((f"worker {worker.rank} ", "dim"), _sign(worker, is_ascii=is_ascii), f" {words}")


def _exception(worker: WorkerState, *, is_ascii: bool) -> Text:
    host = Text(f" ({worker.host})" if worker.host else "", style="dim")
    return _cell(worker, is_ascii=is_ascii).append_text(host)


def _share(worker: WorkerState) -> str:
    return "" if worker.share is None else f"{worker.share:.0%} of a batch"


def _memory(worker: WorkerState) -> str:
    if worker.peak_bytes is None:
        return ""
    of = f" of {format_bytes(worker.predicted_bytes)}" if worker.predicted_bytes else ""
    return f"{format_bytes(worker.peak_bytes)}{of}"


def _waits(worker: WorkerState) -> str:
    waiting = worker.split.get("waiting", 0.0)
    return f"waits {percent(waiting)}" if waiting >= 0.01 else ""


def _host(worker: WorkerState) -> str:
    return worker.host
